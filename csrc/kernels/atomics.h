#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

#include "core/host_device.h"

// What a protocol between ranks needs of the memory they share, so that one code runs between devices and between
// threads of the CPU. All orders hold at system scope: the other side is another device, or another process.
namespace torchtp::kernels {

struct HostAtomics {
  static uint64_t load_acquire(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void store_release(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  static uint64_t fetch_add(uint64_t* word, uint64_t value) {
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
  }
  // Whether the word was `expected`, and is `value` now.
  static bool replace(uint64_t* word, uint64_t expected, uint64_t value) {
    return __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  }
  static uint64_t nanoseconds() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
  }
  static void pause() { std::this_thread::yield(); }
};

#ifdef __CUDACC__
// A release by one thread behind a barrier covers what the other threads of its block wrote: order is cumulative.
struct DeviceAtomics {
  static TORCHTP_HOST_DEVICE uint64_t load_acquire([[maybe_unused]] const uint64_t* word) {
    uint64_t value = 0;
#ifdef __CUDA_ARCH__
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
#endif
    return value;
  }
  static TORCHTP_HOST_DEVICE void store_release([[maybe_unused]] uint64_t* word, [[maybe_unused]] uint64_t value) {
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#endif
  }
  static TORCHTP_HOST_DEVICE uint64_t fetch_add([[maybe_unused]] uint64_t* word, [[maybe_unused]] uint64_t value) {
    uint64_t old = 0;
#ifdef __CUDA_ARCH__
    asm volatile("atom.add.acq_rel.sys.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(value) : "memory");
#endif
    return old;
  }
  static TORCHTP_HOST_DEVICE bool replace([[maybe_unused]] uint64_t* word, uint64_t expected,
                                          [[maybe_unused]] uint64_t value) {
    uint64_t old = ~expected;
#ifdef __CUDA_ARCH__
    asm volatile("atom.cas.acq_rel.sys.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
#endif
    return old == expected;
  }
  static TORCHTP_HOST_DEVICE uint64_t nanoseconds() {
    uint64_t now = 0;
#ifdef __CUDA_ARCH__
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
#endif
    return now;
  }
  static TORCHTP_HOST_DEVICE void pause() {
#ifdef __CUDA_ARCH__
    __nanosleep(100);
#endif
  }
};
#endif

}  // namespace torchtp::kernels
