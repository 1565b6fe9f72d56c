#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"

namespace torchtp {

// Things under numbers that are never used twice: a map that takes no memory for a new one while an old place is free.
// References last until the next add().
template <typename T>
class Tickets {
 public:
  using Ticket = uint64_t;  // never 0

  Ticket add(T value) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(places_.size()));
      places_.emplace_back();
    }
    Place& place = places_[free_.back()];
    place.value = std::move(value);
    place.ticket = ++count_ * kMostPlaces + free_.back();
    free_.pop_back();
    return place.ticket;
  }

  // Null when it was not given out, or is removed.
  T* find(Ticket ticket) {
    const uint64_t index = ticket % kMostPlaces;
    return ticket != 0 && index < places_.size() && places_[index].ticket == ticket ? &places_[index].value : nullptr;
  }

  T& at(Ticket ticket) {
    if (T* const found = find(ticket)) return *found;
    throw Error("there is no such ticket");
  }

  void remove(Ticket ticket) {
    at(ticket) = T{};
    const uint64_t index = ticket % kMostPlaces;
    places_[index].ticket = 0;
    free_.push_back(static_cast<uint32_t>(index));
  }

 private:
  static constexpr uint64_t kMostPlaces = uint64_t{1} << 24;  // at a time; and 2^40 tickets

  struct Place {
    T value{};
    Ticket ticket = 0;
  };

  std::vector<Place> places_;
  std::vector<uint32_t> free_;
  uint64_t count_ = 0;
};

}  // namespace torchtp
