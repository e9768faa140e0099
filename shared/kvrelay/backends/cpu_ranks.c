/* Sums and gathers over the ranks of one machine, through memory that they share.
 *
 * A rank writes its part to a slot of its own, and reads those of the others once all have written theirs. Slots come in
 * two sets that take turns: a rank writes to a set again only after all have written to the other one, so all have read it.
 */
#pragma once
#include "cpu_linear.c"

/* The beginning of the shared memory, all zero at first. The slots follow: [2][size][slot_bytes]. */
typedef struct {
    _Alignas(64) _Atomic int32_t arrived; /* ranks that have written their slots of this turn */
    _Alignas(64) _Atomic uint32_t turn;
    _Atomic int32_t sleeping;
} SharedTurns;

/* One rank's view. */
typedef struct {
    char *memory;
    int64_t rank, size, slot_bytes;
    int64_t turn;       /* turns that this rank has finished; as `turn` above, modulo 2^32 */
    int64_t is_written; /* whether this turn's slot is */
    int64_t at;         /* how far the call that is going on has come: elements or bytes */
} Ranks;

typedef int64_t (*GoesOn)(void);

static char *slot(const Ranks *r, int64_t rank) {
    return r->memory + sizeof(SharedTurns) + ((r->turn & 1) * r->size + rank) * r->slot_bytes;
}

static void write_slot(Ranks *r, const char *from, int64_t bytes) {
    SharedTurns *turns = (SharedTurns *)r->memory;
    if (r->is_written) return;
    memcpy(slot(r, r->rank), from, bytes);
    r->is_written = 1;
    if (atomic_fetch_add(&turns->arrived, 1) + 1 < r->size) return;
    atomic_store_explicit(&turns->arrived, 0, memory_order_relaxed);
    atomic_store(&turns->turn, (uint32_t)(r->turn + 1));
    if (atomic_load(&turns->sleeping)) wake_all((uint32_t *)&turns->turn, 1);
}

/* Waits until all ranks have written. Returns whether they have after `wait_ms`. */
static int all_have_written(const Ranks *r, int64_t wait_ms) {
    SharedTurns *turns = (SharedTurns *)r->memory;
    const uint32_t before = (uint32_t)r->turn;
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&turns->turn, memory_order_acquire) != before) return 1;
        RELAX();
    }
    atomic_fetch_add(&turns->sleeping, 1);
    if (atomic_load(&turns->turn) == before) sleep_while((uint32_t *)&turns->turn, before, wait_ms, 1);
    atomic_fetch_sub(&turns->sleeping, 1);
    return atomic_load(&turns->turn) != before;
}

static void end_turn(Ranks *r) { r->turn++, r->is_written = 0; }

INLINE void sum_slots(const Ranks *r, char *out, int64_t count, const int type) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vfloat sum = load(slot(r, 0), i, type);
        for (int64_t rank = 1; rank < r->size; rank++) sum += load(slot(r, rank), i, type);
        store(out, i, sum, type);
    }
    for (; i < count; i++) {
        float sum = element(slot(r, 0), i, type);
        for (int64_t rank = 1; rank < r->size; rank++) sum += element(slot(r, rank), i, type);
        put(out, i, sum, type);
    }
}

/* out [end - begin] += the sum of elements `begin` to `end` of the slots, which are float. */
static void add_slots(const Ranks *r, int64_t begin, int64_t end, float *out) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        vfloat sum = load(slot(r, 0), i, FLOAT32);
        for (int64_t rank = 1; rank < r->size; rank++) sum += load(slot(r, rank), i, FLOAT32);
        store((char *)out, i - begin, load((const char *)out, i - begin, FLOAT32) + sum, FLOAT32);
    }
    for (; i < end; i++) {
        float sum = element(slot(r, 0), i, FLOAT32);
        for (int64_t rank = 1; rank < r->size; rank++) sum += element(slot(r, rank), i, FLOAT32);
        out[i - begin] += sum;
    }
}

/* The bytes of this turn's slot, of `bytes` in all. */
static int64_t piece_of_slot(const Ranks *r, int64_t bytes) { return at_least(0, at_most(bytes - r->at, r->slot_bytes)); }

/* out [to - from] += elements `from` to `to` of the sum of the ranks' `part` [count], added in the order of ranks; both
 * float. `goes_on` is called each time that others were awaited for `wait_ms`. Returns 0, in the middle, if it does. */
static int add_over_ranks(Ranks *r, const float *part, int64_t count, int64_t from, int64_t to, float *out, int64_t wait_ms,
                          GoesOn goes_on) {
    for (; r->at < count;) {
        const int64_t piece = at_most(count - r->at, r->slot_bytes / 4);
        write_slot(r, (const char *)(part + r->at), piece * 4);
        while (!all_have_written(r, wait_ms))
            if (!goes_on()) return 0;
        const int64_t begin = at_least(0, from - r->at), end = at_most(piece, to - r->at);
        add_slots(r, begin, end, out + (r->at + begin - from));
        end_turn(r);
        r->at += piece;
    }
    r->at = 0;
    return 1;
}

/* out [the sum of counts, row_bytes] = the ranks' `rows` [counts[rank], row_bytes] below each other. Returns 0 as above. */
static int gather_rows_over_ranks(Ranks *r, const char *rows, const int64_t *counts, int64_t row_bytes, char *out,
                                  int64_t wait_ms, GoesOn goes_on) {
    int64_t longest = 0;
    for (int64_t rank = 0; rank < r->size; rank++) longest = at_least(longest, counts[rank] * row_bytes);
    for (; r->at < longest;) {
        const int64_t own = piece_of_slot(r, counts[r->rank] * row_bytes);
        write_slot(r, own ? rows + r->at : rows, own);
        while (!all_have_written(r, wait_ms))
            if (!goes_on()) return 0;
        char *to = out;
        for (int64_t rank = 0; rank < r->size; rank++) {
            const int64_t piece = piece_of_slot(r, counts[rank] * row_bytes);
            if (piece) memcpy(to + r->at, slot(r, rank), piece);
            to += counts[rank] * row_bytes;
        }
        end_turn(r);
        r->at += r->slot_bytes;
    }
    r->at = 0;
    return 1;
}

/* ---- what Python calls ---- */

int64_t kvrelay_shared_bytes(int64_t size, int64_t slot_bytes) { return sizeof(SharedTurns) + 2 * size * slot_bytes; }

int64_t kvrelay_ranks_struct_bytes(void) { return sizeof(Ranks); }

/* data [count] of `type` becomes the sum of the ranks' data, added in the order of ranks. Returns 0 if it has waited for
 * other ranks for `wait_ms`: the same call goes on where it stopped. */
int64_t kvrelay_sum_over_ranks(Ranks *r, char *data, int64_t count, int64_t type, int64_t wait_ms) {
    const int64_t width = type == BFLOAT16 ? 2 : 4;
    for (; r->at < count;) {
        const int64_t piece = at_most(count - r->at, r->slot_bytes / width);
        char *const from = data + r->at * width;
        write_slot(r, from, piece * width);
        if (!all_have_written(r, wait_ms)) return 0;
        if (type == BFLOAT16) sum_slots(r, from, piece, BFLOAT16);
        else sum_slots(r, from, piece, FLOAT32);
        end_turn(r);
        r->at += piece;
    }
    r->at = 0;
    return 1;
}

/* out [size, bytes] (or null) = the ranks' `part` [bytes]. Returns 0 as above. */
int64_t kvrelay_gather_over_ranks(Ranks *r, const char *part, int64_t bytes, char *out, int64_t wait_ms) {
    for (; r->at < bytes;) {
        const int64_t piece = at_most(bytes - r->at, r->slot_bytes);
        write_slot(r, part + r->at, piece);
        if (!all_have_written(r, wait_ms)) return 0;
        for (int64_t rank = 0; out && rank < r->size; rank++) memcpy(out + rank * bytes + r->at, slot(r, rank), piece);
        end_turn(r);
        r->at += piece;
    }
    r->at = 0;
    return 1;
}
