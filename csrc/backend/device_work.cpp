#include "backend/device_work.h"

namespace torchtp::backend {

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  bool done = false;
  try {
    done = inner_->wait(timeout);
  } catch (...) {
    check_();
    throw;
  }
  if (!done) check_();
  return done;
}

}  // namespace torchtp::backend
