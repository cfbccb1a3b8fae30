// Counts how often each thread of a Python takes the global interpreter lock (GIL), and how long it waits for it.
// short_loads.py preloads it (LD_PRELOAD).
//
// CPython 3.11 takes the GIL in take_gil(), which waits by pthread_cond_timedwait while another thread has it, and
// signals the condition "switch_cond" once it has it. drop_gil() signals the condition "cond". So calls of
// pthread_cond_signal are counted by thread and condition: short_loads.py learns which one switch_cond is.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

enum { kThreads = 256, kConditions = 8 };

struct Thread {
  long id;
  uint64_t waits, waited_ns, longest_ns;
  const void* conditions[kConditions];
  uint64_t signals[kConditions];
};

static struct Thread threads[kThreads];
static int count;
static __thread struct Thread* own;

static struct Thread* mine(void) {
  if (own == NULL) {
    const int at = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    own = &threads[at < kThreads ? at : kThreads - 1];
    own->id = gettid();
  }
  return own;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int pthread_cond_signal(pthread_cond_t* condition) {
  static int (*real)(pthread_cond_t*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_signal");
  struct Thread* thread = mine();
  for (int i = 0; i < kConditions; ++i) {
    if (thread->conditions[i] == NULL) thread->conditions[i] = condition;
    if (thread->conditions[i] == condition) {
      ++thread->signals[i];
      break;
    }
  }
  return real(condition);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const struct timespec* until) {
  static int (*real)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct Thread* thread = mine();
  const uint64_t began = now_ns();
  const int result = real(condition, mutex, until);
  const uint64_t took = now_ns() - began;
  ++thread->waits;
  thread->waited_ns += took;
  if (took > thread->longest_ns) thread->longest_ns = took;
  return result;
}

const struct Thread* gil_probe_threads(void) { return threads; }
int gil_probe_count(void) { return count < kThreads ? count : kThreads; }
