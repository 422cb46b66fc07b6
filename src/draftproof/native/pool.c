/* The threads of the library: created at first use, kept, and asleep when idle.
 *
 * One phase of work is shared at a time. Its pieces are numbered, and a thread takes the next one with
 * an atomic operation that fails if the phase is over. So a thread may come late, or lose its core
 * between phases, and nobody waits for it. The calling thread works too; another thread that calls in
 * the meantime computes its phase alone. */
#define _GNU_SOURCE
#include "pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifndef _WIN32
#include <signal.h>
#endif

/* Pieces per thread; the least and the most nanoseconds that a thread spins; the stack size that
 * kernels need. */
enum { PIECES = 4, SHORT = 4000, LONG = 40000, STACK = 8 << 20, MOST_THREADS = 1024 };
/* Bits of a piece's number, and a number that is never reached. */
enum { PIECE_BITS = 24, LAST_PIECE = (1 << PIECE_BITS) - 1 };

typedef _Atomic uint32_t Counter;

static struct {
    _Alignas(64) _Atomic uint64_t next;         /* the phase's number, and its next piece */
    _Atomic(Items) compute;
    _Atomic(const void *) work;
    _Atomic int64_t count, pieces, threads;
    _Alignas(64) Counter done;                  /* pieces of the phase */
    Counter waiting;                            /* whether the caller sleeps until they are done */
    _Alignas(64) Counter phases;                /* so far */
    Counter asleep;                             /* threads that sleep until the next */
    _Alignas(64) Counter taken;                 /* whether a phase is being shared */
    int64_t made;                               /* threads; of who has `taken` the pool */
} pool;

/* Sleep while a counter has a value; wake all threads that sleep on it. */
#ifdef __linux__
static void sleep_on(Counter *counter, uint32_t value) {
    syscall(SYS_futex, counter, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(Counter *counter) {
    syscall(SYS_futex, counter, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void sleep_on(Counter *counter, uint32_t value) {
    pthread_mutex_lock(&mutex);
    while (atomic_load(counter) == value) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

static void wake(Counter *counter) {
    (void)counter;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}
#endif

static inline void pause_briefly(void) {
#ifdef __aarch64__
    __asm__ volatile("isb" ::: "memory");
#else
    __builtin_ia32_pause();
#endif
}

static int64_t nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* Wait until a counter has changed: first by spinning, which reacts faster, then asleep, so that
 * another thread can use the core. If spinning was in vain, because another program uses the core of
 * the awaited thread, the next spin is shorter. */
static void await_change(Counter *counter, uint32_t value, Counter *sleepers) {
    static _Thread_local int64_t awake = LONG;
    for (int64_t end = 0, now = 0; now <= end; now = nanoseconds(), end = end ? end : now + awake)
        for (int i = 0; i < 16; i++) {
            if (atomic_load(counter) != value) {
                awake = awake + awake / 16 < LONG ? awake + awake / 16 : LONG;
                return;
            }
            pause_briefly();
        }
    awake = awake / 2 > SHORT ? awake / 2 : SHORT;
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(counter) == value) sleep_on(counter, value);
    atomic_fetch_sub(sleepers, 1);
}

/* The first item of a piece. The first pieces are the largest, twice the mean, and the last ones the
 * smallest, so that all threads end together. */
static int64_t begin_of(int64_t piece, int64_t pieces, int64_t count) {
    int64_t left = pieces - piece;
    if (pieces < 4) return count * piece / pieces;
    return count - (int64_t)((double)count * (double)(left * left) / (double)(pieces * pieces));
}

/* Take pieces of the phase and compute them until all are taken, as the thread of this number, which
 * may be above the number of threads in use. */
static void take_pieces(int64_t number) {
    for (;;) {
        uint64_t next = atomic_load(&pool.next);
        int64_t piece = (int64_t)(next & LAST_PIECE);
        int64_t count = atomic_load(&pool.count), pieces = atomic_load(&pool.pieces);
        const void *work = atomic_load(&pool.work);
        Items compute = atomic_load(&pool.compute);
        if (piece >= pieces || number >= atomic_load(&pool.threads)) return;
        /* if a piece is left, the phase is not over, so all this was read from one phase */
        if (!atomic_compare_exchange_weak(&pool.next, &next, next + 1)) continue;
        compute(work, begin_of(piece, pieces, count), begin_of(piece + 1, pieces, count));
        if (atomic_fetch_add(&pool.done, 1) + 1 == (uint32_t)pieces && atomic_load(&pool.waiting))
            wake(&pool.done);
    }
}

static void *take_phases(void *number) {
    for (;;) {
        uint32_t phases = atomic_load(&pool.phases);
        take_pieces((int64_t)(intptr_t)number);
        await_change(&pool.phases, phases, &pool.asleep);
    }
    return NULL;
}

#ifndef _WIN32
/* A forked process has none of the threads, and their work is lost. */
static void forget_threads(void) {
    memset(&pool, 0, sizeof pool);
#ifndef __linux__
    pthread_mutex_init(&mutex, NULL), pthread_cond_init(&changed, NULL);
#endif
}

static void register_fork(void) { pthread_atfork(NULL, NULL, forget_threads); }
#endif

/* Set the number of threads, the calling one included, as far as the system allows. They block
 * signals, which belong to the program's own threads. */
static void make_threads(int64_t threads) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK);
#ifndef _WIN32
    static pthread_once_t registered = PTHREAD_ONCE_INIT;
    pthread_once(&registered, register_fork);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    for (pthread_t thread; pool.made + 1 < threads; pool.made++)
        if (pthread_create(&thread, &attributes, take_phases, (void *)(intptr_t)(pool.made + 1)))
            break;
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
    pthread_attr_destroy(&attributes);
}

void share_out(Items compute, const void *work, int64_t count, int64_t least, int64_t threads) {
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    int64_t pieces = count / (least > 1 ? least : 1);
    pieces = pieces < threads * PIECES ? pieces : threads * PIECES;
    if (threads < 2 || pieces < 2 || atomic_exchange(&pool.taken, 1)) {
        if (count > 0) compute(work, 0, count);
        return;
    }
    if (pool.made + 1 < threads) make_threads(threads);
    uint32_t phase = atomic_load(&pool.phases) + 1;
    /* no piece can be taken while the phase is described */
    atomic_store(&pool.next, ((uint64_t)phase << PIECE_BITS) + LAST_PIECE);
    atomic_store(&pool.compute, compute), atomic_store(&pool.work, work);
    atomic_store(&pool.count, count), atomic_store(&pool.pieces, pieces);
    atomic_store(&pool.threads, threads), atomic_store(&pool.done, 0);
    atomic_store(&pool.next, (uint64_t)phase << PIECE_BITS);
    atomic_store(&pool.phases, phase);
    if (atomic_load(&pool.asleep)) wake(&pool.phases);
    take_pieces(0);
    for (uint32_t done; (done = atomic_load(&pool.done)) < (uint32_t)pieces;)
        await_change(&pool.done, done, &pool.waiting);
    atomic_store(&pool.taken, 0);
}
