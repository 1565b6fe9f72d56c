// Preloaded by tests/test_backend_faults.py and tests/test_backend_limits.py, which set the variables.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

atomic_long no_memory;     // every reservation fails
atomic_long no_threads;    // none can be started
atomic_long jump_seconds;  // how far the wall clock jumps, forward and back, whenever it is read

static atomic_long reads;

int posix_fallocate(int file, off_t offset, off_t length) {
  if (atomic_load(&no_memory)) return ENOMEM;
  return fallocate(file, 0, offset, length) == 0 ? 0 : errno;
}

int pthread_create(pthread_t* restrict thread, const pthread_attr_t* restrict attributes, void* (*body)(void*),
                   void* restrict argument) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (atomic_load(&no_threads)) return EAGAIN;
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "pthread_create");
  return real(thread, attributes, body, argument);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  const int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += atomic_fetch_add(&reads, 1) % 2 ? jump_seconds : -jump_seconds;
  }
  return result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec precise;
  const int result = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return result;
}

time_t time(time_t* now) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
