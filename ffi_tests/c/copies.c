// Build: forks
// spw_copies: pieces of any length and alignment, sources that overlap, any number of threads, a forked child, and what the
// function refuses.

#include "child.h"

enum { PIECE = 256 << 10, LENGTH = 5 * PIECE + 777, MANY = 2000 };

static unsigned char *from, *to;
static void *targets[MANY];
static const void *sources[MANY];
static uint64_t bytes[MANY];

static void clear(void) {
    memset(to, 0xa5, LENGTH);
}

// Byte `at` of the target is that of the source at `at + moved`.
static void is_copied(size_t start, size_t end, long moved) {
    CHECK(memcmp(to + start, from + (long)start + moved, end - start) == 0);
}

static void one_piece_of_any_length(void) {
    const uint64_t lengths[] = {0, 1, 7, 64, 4097, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, LENGTH - 5};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        clear();
        targets[0] = to + 3;
        sources[0] = from + 5;
        CHECK_OK(spw_copies(targets, sources, &lengths[i], 1));
        is_copied(3, 3 + lengths[i], 2);
        CHECK(to[2] == 0xa5 && to[3 + lengths[i]] == 0xa5);
    }
}

// Pieces beside each other, some of no bytes; all read from the same place.
static void prepare_many(void) {
    size_t at = 0;
    for (int i = 0; i < MANY; i++) {
        bytes[i] = (uint64_t)i * (uint64_t)i % 1201;
        targets[i] = bytes[i] > 0 ? to + at : NULL;
        sources[i] = bytes[i] > 0 ? from + i % 7 : NULL;
        at += bytes[i];
    }
    CHECK(at <= LENGTH);
}

static void many_pieces(void) {
    clear();
    CHECK_OK(spw_copies(targets, sources, bytes, MANY));
    for (int i = 0; i < MANY; i++) {
        CHECK(bytes[i] == 0 || memcmp(targets[i], sources[i], bytes[i]) == 0);
    }
}

static void any_number_of_threads(void) {
    for (uint32_t threads = 1; threads < 5; threads++) {
        configure_threads(threads);
        one_piece_of_any_length();
        prepare_many();
        many_pieces();
    }
    in_child(many_pieces, "copies in a child");
    configure_threads(0);
}

static void refused(void) {
    void *into[2] = {to, NULL};
    const void *out_of[2] = {from, NULL};
    uint64_t lengths[2] = {5, 0};
    clear();
    watch(to, LENGTH);
    CHECK_OK(spw_copies(NULL, NULL, NULL, 0));
    INVALID(spw_copies(NULL, out_of, lengths, 2), "to: is NULL");
    INVALID(spw_copies(into, NULL, lengths, 2), "from: is NULL");
    INVALID(spw_copies(into, out_of, NULL, 2), "bytes: is NULL");
    lengths[1] = 3;
    INVALID(spw_copies(into, out_of, lengths, 2), "to[1]: is NULL, but has 3 bytes");
    into[1] = to + 100;
    INVALID(spw_copies(into, out_of, lengths, 2), "from[1]: is NULL, but has 3 bytes");
    out_of[1] = from;
    const uint64_t beyond[] = {UINT64_MAX, UINT64_MAX / 2, (uint64_t)1 << 56};
    for (int i = 0; i < 3; i++) {
        lengths[1] = beyond[i];
        INVALID(spw_copies(into, out_of, lengths, 2), "bytes[1]");
    }
    INVALID(spw_copies(into, out_of, lengths, UINT64_MAX), "to");
    unwatch_all();
}

int main(void) {
    from = malloc(LENGTH), to = malloc(LENGTH);
    CHECK(from != NULL && to != NULL);
    uint64_t seed = 1;
    for (size_t i = 0; i < LENGTH; i++) from[i] = (unsigned char)random_bits(&seed);
    any_number_of_threads();
    refused();
    free(from), free(to);
    return 0;
}
