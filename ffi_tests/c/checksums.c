// Build: forks
// spw_checksums: known values, a value that depends on the bytes alone, each byte counts, memory of no bytes, a forked child,
// and what the function refuses.

#include "child.h"

enum { PIECE = 256 << 10, LENGTH = 5 * PIECE + 777, SMALL = 2000 };

static unsigned char *memory;

static uint64_t checksum(const void *from, uint64_t bytes) {
    uint64_t sum = 0;
    CHECK_OK(spw_checksums(&from, &bytes, 1, &sum));
    return sum;
}

// The values of the C library xxHash 0.8.4.
static void known_values(void) {
    unsigned char bytes[1024];
    for (uint64_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)(i * i * 31 + i * 7 + (i >> 8));
    CHECK(checksum(NULL, 0) == 0x2d06800538d394c2u);
    CHECK(checksum(bytes, 1) == 0xc44bdff4074eecdbu);
    CHECK(checksum(bytes, 17) == 0xf023ce206c53cb88u);
    CHECK(checksum(bytes, 1024) == 0x6049adedbb22283eu);
}

// A checksum of more than a piece is that of the checksums of its pieces.
static void large_memory_is_cut(void) {
    unsigned char words[8 * 6];
    for (int i = 0; i < 6; i++) {
        const uint64_t sum = checksum(memory + (size_t)i * PIECE, i < 5 ? PIECE : 777);
        for (int at = 0; at < 8; at++) words[8 * i + at] = (unsigned char)(sum >> 8 * at);
    }
    CHECK(checksum(memory, LENGTH) == checksum(words, sizeof words));
}

static void each_byte_counts(void) {
    const uint64_t before = checksum(memory, LENGTH);
    const size_t places[] = {0, 1, PIECE - 1, PIECE, 3 * PIECE + 5, LENGTH - 1};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        memory[places[i]] ^= 1;
        CHECK(checksum(memory, LENGTH) != before);
        memory[places[i]] ^= 1;
    }
    CHECK(checksum(memory, LENGTH) == before);
}

static const void *data[SMALL];
static uint64_t bytes[SMALL], alone[SMALL], together[SMALL];

// Lengths and addresses of any kind, among them overlapping memory.
static void prepare_many(void) {
    for (int i = 0; i < SMALL; i++) {
        bytes[i] = (uint64_t)i * (uint64_t)i % 3001;
        data[i] = bytes[i] > 0 ? memory + 131 * i : NULL;
    }
    data[7] = memory + 1;
    bytes[7] = LENGTH - 1;
    for (int i = 0; i < SMALL; i++) alone[i] = checksum(data[i], bytes[i]);
}

static void many_have_the_values_of_each(void) {
    memset(together, 0, sizeof together);
    CHECK_OK(spw_checksums(data, bytes, SMALL, together));
    CHECK(memcmp(together, alone, sizeof alone) == 0);
}

static void any_number_of_threads(void) {
    for (uint32_t threads = 1; threads < 5; threads++) {
        configure_threads(threads);
        many_have_the_values_of_each();
    }
    in_child(many_have_the_values_of_each, "checksums in a child");
    configure_threads(0);
}

static void refused(void) {
    const void *from[2] = {memory, NULL};
    uint64_t lengths[2] = {5, 0}, sums[2] = {77, 77};
    watch(sums, sizeof sums);
    CHECK_OK(spw_checksums(NULL, NULL, 0, NULL));
    INVALID(spw_checksums(NULL, lengths, 2, sums), "data: is NULL");
    INVALID(spw_checksums(from, NULL, 2, sums), "bytes: is NULL");
    INVALID(spw_checksums(from, lengths, 2, NULL), "sums_out: is NULL");
    lengths[1] = 3;
    INVALID(spw_checksums(from, lengths, 2, sums), "data[1]: is NULL, but has 3 bytes");
    from[1] = memory;
    const uint64_t beyond[] = {UINT64_MAX, UINT64_MAX / 2, (uint64_t)1 << 56};
    for (int i = 0; i < 3; i++) {
        lengths[1] = beyond[i];
        INVALID(spw_checksums(from, lengths, 2, sums), "bytes[1]");
    }
    INVALID(spw_checksums(from, lengths, UINT64_MAX, sums), "data");
    unwatch_all();
}

int main(void) {
    memory = malloc(LENGTH);
    CHECK(memory != NULL);
    uint64_t seed = 1;
    for (size_t i = 0; i < LENGTH; i++) memory[i] = (unsigned char)random_bits(&seed);
    known_values();
    large_memory_is_cut();
    each_byte_counts();
    prepare_many();
    many_have_the_values_of_each();
    any_number_of_threads();
    refused();
    free(memory);
    return 0;
}
