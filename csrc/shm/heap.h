#pragma once

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "shm/segment.h"

namespace torchtp::shm {

// Hands out blocks of my own part of the segment, best fit, neighbours joined when freed. Its books are private to this
// process. Pages of freed blocks are kept for reuse up to a limit and then given back. Thread-safe.
class Heap {
 public:
  Heap(std::shared_ptr<Segment> segment, int rank);

  std::byte* allocate(size_t num_bytes);
  void free(std::byte* pointer);
  bool owns(const void* pointer, size_t num_bytes) const;
  size_t allocated_bytes() const;

 private:
  void add_free(size_t offset, size_t num_bytes);
  void remove_free(size_t offset, size_t num_bytes);
  void reserve(size_t offset, size_t num_bytes);
  void give_back();

  std::shared_ptr<Segment> segment_;
  std::byte* const base_;
  const size_t num_bytes_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;                     // offset -> bytes
  std::set<std::pair<size_t, size_t>> free_by_size_;  // (bytes, offset)
  std::unordered_map<size_t, size_t> blocks_;         // offset -> bytes
  std::vector<bool> reserved_;                        // of each page below the highest one ever used
  size_t num_reserved_ = 0;                           // pages
  size_t allocated_ = 0;
};

}  // namespace torchtp::shm
