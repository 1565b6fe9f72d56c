#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <vector>

namespace torchtp::gradients {

// The stream on which a device's buckets are packed, reduced and unpacked while its other streams compute. The CPU has
// none: there every call does nothing, and work is done when it is asked for.
class SideStream {
 public:
  explicit SideStream(const c10::Device& device);

  // None on the CPU. To be current while work is given to it; a collective then takes it for the stream to follow.
  const std::optional<c10::Stream>& stream() const { return stream_; }
  // The stream that is current on the device, if there are streams.
  std::optional<c10::Stream> current() const;
  // What `writers` and the current stream have been given by now comes before what the side stream is given next.
  void follow(const std::vector<c10::Stream>& writers) const;
  // What the side stream has been given by now comes before what the current stream is given next.
  void lead() const;

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace torchtp::gradients
