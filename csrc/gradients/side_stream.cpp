#include "gradients/side_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace torchtp::gradients {
namespace {

void order(const c10::Stream& first, const c10::Stream& then) {
  if (first == then) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(then);
}

}  // namespace

SideStream::SideStream(const c10::Device& device) : device_(device) {
  // Of high priority: packing is short, and the network waits for it.
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
}

std::optional<c10::Stream> SideStream::current() const {
  if (!stream_) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void SideStream::follow(const std::vector<c10::Stream>& writers) const {
  if (!stream_) return;
  const c10::Stream now = *current();
  for (const c10::Stream& writer : writers) {
    if (writer != now) order(writer, *stream_);
  }
  order(now, *stream_);
}

void SideStream::lead() const {
  if (stream_) order(*stream_, *current());
}

}  // namespace torchtp::gradients
