/* The threads of one call, which go through its pieces together: within one parallel region of OpenMP they share out the
 * items of a piece and wait for each other after it.
 *
 * A decode step of a small model has some sixty such pieces of 5 to 50 us. A region for each would put the other threads
 * to sleep and wake them as often (OMP_WAIT_POLICY is passive, see worker_main.py), which costs about as much as a piece.
 * Here a thread spins for as long as a piece takes and sleeps only then, so a core that another process needs is not held.
 */
#pragma once
#include <limits.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif

enum { SPINS = 1500 }; /* of RELAX before a waiting thread sleeps: 30 to 100 us */
enum { AT_ONCE = 4 };   /* small items */

/* All zero before its region. */
typedef struct {
    _Atomic int size;
    _Alignas(64) _Atomic int64_t next; /* the first item of this piece that nobody has taken */
    _Alignas(64) _Atomic int arrived;  /* threads that are done with this piece */
    _Alignas(64) _Atomic uint32_t piece;
    _Atomic int sleeping;
} Team;

/* Each thread's first word in the region. OpenMP may have given fewer threads than were asked for. */
static void join_team(Team *team) {
    atomic_store_explicit(&team->size, omp_get_num_threads(), memory_order_relaxed);
}

/* Runs the body once for each of `count` items, on whichever thread comes first. No thread may use what the body wrote
 * before `end_piece`. */
#define SHARE_ITEMS(team, item, count) \
    for (int64_t item; (item = atomic_fetch_add_explicit(&(team)->next, 1, memory_order_relaxed)) < (count);)

/* The same for items that are too small to be taken one by one. */
#define SHARE_SMALL_ITEMS(team, item, count)                                                                              \
    for (int64_t first_; (first_ = atomic_fetch_add_explicit(&(team)->next, AT_ONCE, memory_order_relaxed)) < (count);)   \
        for (int64_t item = first_; item < (count) && item < first_ + AT_ONCE; item++)

/* Sleeps while a word holds `value`, for at most `wait_ms`, or until `wake_all`. It may return earlier. A word that
 * processes share is `shared`. */
static void sleep_while(uint32_t *word, uint32_t value, int64_t wait_ms, int shared) {
#if defined(__linux__)
    const struct timespec limit = {wait_ms / 1000, wait_ms % 1000 * 1000000};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, &limit, NULL, 0);
#else
    sched_yield();
#endif
}

static void wake_all(uint32_t *word, int shared) {
#if defined(__linux__)
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

/* The next run of consecutive items for this thread, up to `end`: long ones first, of half an equal share of what is left,
 * so that threads end together. Returns `count` if there are none left. */
static int64_t take_run(Team *team, int64_t count, int64_t *end) {
    const int64_t shares = 2 * (int64_t)atomic_load_explicit(&team->size, memory_order_relaxed);
    int64_t first = atomic_load_explicit(&team->next, memory_order_relaxed);
    do {
        if (first >= count) return count;
        const int64_t share = (count - first) / shares;
        *end = first + (share > 1 ? share : 1);
    } while (!atomic_compare_exchange_weak_explicit(&team->next, &first, *end, memory_order_relaxed, memory_order_relaxed));
    return first;
}

/* As SHARE_ITEMS, for items whose memory lies side by side: a thread that reads it in long runs gets it a third faster. */
#define SHARE_RUNS(team, item, count)                                                                     \
    for (int64_t end_ = 0, first_; (first_ = take_run((team), (count), &end_)) < (count);)                \
        for (int64_t item = first_; item < end_; item++)

/* Waits until all threads of the team are here. All items of the next piece can be taken after it. */
static void end_piece(Team *team) {
    const int size = atomic_load_explicit(&team->size, memory_order_relaxed);
    const uint32_t piece = atomic_load_explicit(&team->piece, memory_order_relaxed);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == size) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store(&team->piece, piece + 1);
        /* Sequentially consistent on both sides: either a sleeper is seen here, or it sees the new piece. */
        if (atomic_load(&team->sleeping)) wake_all((uint32_t *)&team->piece, 0);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&team->piece, memory_order_acquire) != piece) return;
        RELAX();
    }
    atomic_fetch_add(&team->sleeping, 1);
    while (atomic_load(&team->piece) == piece) sleep_while((uint32_t *)&team->piece, piece, 1000, 0);
    atomic_fetch_sub(&team->sleeping, 1);
}
