// A transfer whose memory lies partly in a pinned block: the block is freed while the transfer is in flight, and its next
// owner writes to it. The file has the bytes of the first owner, and a read leaves the next owner's memory alone.

#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

// Small allocations share mappings; this many blocks fill one.
enum { FOR_EVER = -1, BLOCK = 4 << 20, BLOCKS = 16 };

// Memory beside the block, without a gap; NULL if that address is taken.
static unsigned char *beside(unsigned char *address) {
    void *found = mmap(address, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (found != MAP_FAILED && found != address) munmap(found, BLOCK);
    return found == (void *)address ? found : NULL;
}

static void expect_file(const char *path, int value, size_t bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    for (size_t at = 0; at < bytes; at++) CHECK(getc(file) == value);
    fclose(file);
}

// True if the case ran: the neighbouring addresses were free.
static int straddle(uint32_t backend, int after, int reads) {
    spw_io_options options = {.struct_size = sizeof options, .backend = backend};
    spw_io *io = NULL;
    void *blocks[BLOCKS], *next = NULL;
    CHECK_OK(spw_io_open(&options, &io));
    int chosen = 0; // The first block of the mapping, or the last.
    for (int n = 0; n < BLOCKS; n++) {
        CHECK_OK(spw_pinned_alloc(NULL, BLOCK, &blocks[n]));
        if (after ? blocks[n] > blocks[chosen] : blocks[n] < blocks[chosen]) chosen = n;
    }
    unsigned char *block = blocks[chosen];
    unsigned char *other = beside(after ? block + BLOCK : block - BLOCK);
    if (other != NULL) {
        unsigned char *from = after ? block : other;
        memset(from, 'A', 2 * BLOCK);
        spw_io_request request = {.struct_size = sizeof request, .path = "straddle", .buffer = from, .bytes = 2 * BLOCK};
        uint64_t handle = 0;
        CHECK_OK(reads ? spw_io_read(io, &request, &handle) : spw_io_write(io, &request, &handle));
        CHECK_OK(spw_pinned_free(block));
        // The block is quarantined and the next is another, or the transfer has ended.
        CHECK_OK(spw_pinned_alloc(NULL, BLOCK, &next));
        memset(next, 'Z', BLOCK);
        CHECK_OK(spw_io_wait(io, &handle, 1, FOR_EVER, NULL));
        if (!reads) expect_file("straddle", 'A', 2 * BLOCK);
        for (size_t at = 0; at < BLOCK; at++) CHECK(((unsigned char *)next)[at] == 'Z');
        CHECK_OK(spw_pinned_free(next));
        CHECK(munmap(other, BLOCK) == 0);
    } else {
        CHECK_OK(spw_pinned_free(block));
    }
    for (int n = 0; n < BLOCKS; n++) {
        if (n != chosen) CHECK_OK(spw_pinned_free(blocks[n]));
    }
    CHECK_OK(spw_io_close(io, FOR_EVER));
    return other != NULL;
}

int main(void) {
    int ran = 0;
    // A read needs the file also if no write ran, because the addresses were taken.
    FILE *file = fopen("straddle", "wb");
    CHECK(file != NULL);
    for (size_t at = 0; at < 2 * BLOCK; at++) CHECK(putc('A', file) != EOF);
    CHECK(fclose(file) == 0);
    for (int turn = 0; turn < 8; turn++) {
        ran += straddle(turn & 4 ? SPW_IO_BACKEND_THREADS : SPW_IO_BACKEND_AUTO, turn & 1, turn & 2);
    }
    if (ran == 0) skip("the addresses beside the blocks are taken");
    return 0;
}
