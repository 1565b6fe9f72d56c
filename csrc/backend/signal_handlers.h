#pragma once

#include <chrono>

namespace torchtp::backend {

constexpr std::chrono::milliseconds kBetweenSignals{100};  // how often a long wait lets handlers run

// Lets the program's Python signal handlers run, which Python itself does only between its own instructions: for
// whoever waits long on the main thread. Throws what a handler raises (Ctrl-C: KeyboardInterrupt), with its words in
// what(). Does nothing on any other thread. Takes Python's lock.
void run_signal_handlers();

// Whether such a handler has called on this thread, which waits meanwhile.
bool in_signal_handler();

// Throws DistBackendError in such a handler: the wait holds the group. `call`: "a collective".
void refuse_in_signal_handler(const char* call);

}  // namespace torchtp::backend
