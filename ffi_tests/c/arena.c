// Arenas within one process: places, generations, verdicts, and the refusal of everything that does not fit.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <fcntl.h>
#include <spillway/arena.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FOREVER = -1 };

static char name[64], path[128];

static spw_arena_options three_regions(spw_arena_region *regions) {
    static const char *const names[3] = {"first", "second", "third"};
    static const uint64_t bytes[3] = {1, 4096, 100000};
    for (int i = 0; i < 3; i++) {
        regions[i] = (spw_arena_region){sizeof *regions, 0, names[i], bytes[i]};
    }
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.regions = regions;
    options.region_count = 3;
    options.processes = 2;
    return options;
}

// A create that fails leaves no file, whichever of its steps lacks a descriptor, and however many locks there are.
static void check_failed_creates(void) {
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    options.name = name;
    struct rlimit before, few;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const int lowest = open("/dev/null", O_RDONLY);
    CHECK(lowest >= 0 && close(lowest) == 0);
    spw_arena *arena = NULL;
    int failures = 0;
    for (few = before, few.rlim_cur = (rlim_t)lowest; arena == NULL; few.rlim_cur++, failures++) {
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        const spw_status status = spw_arena_create(&options, &arena);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(status == SPW_OK || (status == SPW_ERR_SYSTEM && access(path, F_OK) != 0));
    }
    CHECK(failures > 2);
    // A descriptor that exists, without room for its duplicate, is no wrong argument.
    const int memory = memfd_create("none", MFD_CLOEXEC);
    few.rlim_cur = (rlim_t)memory + 1;
    CHECK(memory >= 0 && setrlimit(RLIMIT_NOFILE, &few) == 0);
    spw_arena *other = NULL;
    const spw_status status = spw_arena_open_fd(memory, 0, &other);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0 && status == SPW_ERR_SYSTEM && close(memory) == 0);
    CHECK_OK(spw_arena_close(arena));

    enum { LOCKS = 1024 };
    static spw_arena *many[LOCKS];
    few = before;
    if (few.rlim_max < 3 * LOCKS) return;
    few.rlim_cur = 3 * LOCKS;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    options.name = NULL;
    for (int i = 0; i < LOCKS; i++) CHECK_OK(spw_arena_create(&options, &many[i]));
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_LIMIT_REACHED, "1024 locks");
    options.name = name;
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_LIMIT_REACHED, "1024 locks");
    CHECK(access(path, F_OK) != 0);
    for (int i = 0; i < LOCKS; i++) CHECK_OK(spw_arena_close(many[i]));
    const mode_t mask = umask(0777);
    CHECK_OK(spw_arena_create(&options, &arena));
    umask(mask);
    struct stat found;
    CHECK(stat(path, &found) == 0 && (found.st_mode & 07777) == 0600);
    CHECK_OK(spw_arena_close(arena));
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

static void check_regions(void) {
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    options.name = name;
    spw_arena *arena = NULL, *other = NULL, *none = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    struct stat found;
    CHECK(stat(path, &found) == 0 && (found.st_mode & 07777) == 0600);
    REFUSED(spw_arena_create(&options, &none), SPW_ERR_ARENA_EXISTS, "owns it");
    options.flags = SPW_ARENA_FLAG_COLLECT;
    REFUSED(spw_arena_create(&options, &none), SPW_ERR_ARENA_EXISTS, "owns it");
    CHECK_OK(spw_arena_open(name, 0, 0, &other));
    for (uint32_t i = 0; i < 3; i++) {
        spw_arena_region_info mine = SPW_ARENA_REGION_INFO_INIT, theirs = SPW_ARENA_REGION_INFO_INIT;
        char text[65];
        uint64_t needed = 0;
        uint32_t index = 77;
        CHECK_OK(spw_arena_get_region(arena, i, &mine, text, sizeof text, &needed));
        CHECK(strcmp(text, regions[i].name) == 0 && needed == strlen(text) + 1);
        CHECK_OK(spw_arena_get_region(other, i, &theirs, NULL, 0, NULL));
        CHECK(mine.offset == theirs.offset && mine.bytes == regions[i].bytes && mine.generation == 0);
        CHECK_OK(spw_arena_find(other, text, &index));
        CHECK(index == i);
        CHECK_OK(spw_arena_write_begin(arena, i, 3, NULL));
        memset(mine.address, (int)i + 1, mine.bytes);
        CHECK_OK(spw_arena_write_end(arena, i));
        unsigned char byte = 0;
        uint64_t generation = 0;
        CHECK_OK(spw_arena_read(other, i, 3, mine.bytes - 1, &byte, 1, 0, &generation));
        CHECK(byte == i + 1 && generation == 3);
    }
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(other, &info));
    CHECK(info.owner_lives && !info.is_owner && !info.writable && info.owner_pid == (uint32_t)getpid());
    CHECK(info.region_count == 3 && info.processes == 2 && info.base != NULL && info.fd >= 0);
    CHECK_OK(spw_arena_close(arena));
    CHECK(access(path, F_OK) != 0);
    CHECK_OK(spw_arena_get_info(other, &info));
    CHECK(!info.owner_lives);
    CHECK_OK(spw_arena_close(other));
    REFUSED(spw_arena_open(name, 0, 0, &other), SPW_ERR_ARENA_MISSING, name);
}

static void check_reads_and_writes(void) {
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    spw_arena *arena = NULL, *reader = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arena, &info));
    CHECK_OK(spw_arena_open_fd(info.fd, 0, &reader));
    spw_arena_snapshot snapshot = SPW_ARENA_SNAPSHOT_INIT, unused = SPW_ARENA_SNAPSHOT_INIT;
    unsigned char bytes[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    watch(bytes, sizeof bytes), watch(&unused, sizeof unused);
    CHECK_OK(spw_arena_read_begin(reader, 1, 0, FOREVER, &snapshot));
    CHECK_OK(spw_arena_read_validate(reader, 1, &snapshot));
    uint32_t torn = 77;
    CHECK_OK(spw_arena_write_begin(arena, 1, 1, &torn));
    CHECK(torn == 0);
    REFUSED(spw_arena_read_validate(reader, 1, &snapshot), SPW_ERR_ARENA_CHANGED, "\"second\"");
    REFUSED(spw_arena_read(reader, 1, 0, 0, bytes, 8, 0, NULL), SPW_ERR_TIMEOUT, "is writing region \"second\"");
    REFUSED(spw_arena_write_begin(arena, 1, 2, NULL), SPW_ERR_BUSY, "is writing it");
    REFUSED(spw_arena_write_begin(reader, 0, 1, NULL), SPW_ERR_UNSUPPORTED, "reading only");
    CHECK_OK(spw_arena_write_abort(arena, 1, 0));
    REFUSED(spw_arena_read_begin(reader, 1, 0, FOREVER, &unused), SPW_ERR_ARENA_TORN, "\"second\"");
    CHECK_OK(spw_arena_write_begin(arena, 1, 1, &torn));
    CHECK(torn == 1);
    CHECK_OK(spw_arena_write_end(arena, 1));
    REFUSED(spw_arena_read_begin(reader, 1, 2, 5, &unused), SPW_ERR_TIMEOUT, "has generation 1, not 2");
    INVALID(spw_arena_write_end(arena, 1), "not being written");
    INVALID(spw_arena_write_begin(arena, 1, 1, NULL), "has generation 1");
    INVALID(spw_arena_write_begin(arena, 1, 0, NULL), "is 0");
    INVALID(spw_arena_write_begin(arena, 3, 2, NULL), "there are 3 regions");
    INVALID(spw_arena_write_abort(arena, 0, 2), "restored");
    INVALID(spw_arena_read(reader, 1, 0, 4090, bytes, 8, 0, NULL), "not inside a region of 4096 bytes");
    INVALID(spw_arena_read(reader, 1, 0, UINT64_MAX, bytes, 8, 0, NULL), "not inside");
    INVALID(spw_arena_read(reader, 1, 0, 0, bytes, UINT64_MAX, 0, NULL), "bytes");
    INVALID(spw_arena_read(reader, 1, 0, 0, NULL, 8, 0, NULL), "to_out");
    CHECK_OK(spw_arena_read(reader, 1, 0, 4096, NULL, 0, 0, NULL));
    unwatch_all();
    // A write that is open at the close leaves the region torn.
    CHECK_OK(spw_arena_write_begin(arena, 0, 1, NULL));
    CHECK_OK(spw_arena_close(arena));
    REFUSED(spw_arena_read_begin(reader, 0, 0, FOREVER, &snapshot), SPW_ERR_ARENA_TORN, "\"first\"");
    CHECK_OK(spw_arena_close(reader));
}

static void check_verdicts(void) {
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    spw_arena *arenas[2] = {NULL, NULL};
    CHECK_OK(spw_arena_create(&options, &arenas[0]));
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arenas[0], &info));
    CHECK_OK(spw_arena_open_fd(info.fd, SPW_ARENA_OPEN_FLAG_WRITE, &arenas[1]));
    spw_arena_verdict verdict = SPW_ARENA_VERDICT_INIT;
    const spw_step_stats stats = {sizeof stats, 0, 2.5};
    INVALID(spw_arena_post(arenas[0], 0, 1, &stats, 0), "has not joined");
    for (uint32_t i = 0; i < 2; i++) CHECK_OK(spw_arena_join(arenas[i], i));
    REFUSED(spw_arena_join(arenas[0], 1), SPW_ERR_BUSY, "has joined as 1");
    INVALID(spw_arena_join(arenas[0], 2), "created for 2 processes");
    INVALID(spw_arena_wait_verdict(arenas[0], 0, 0, &verdict), "round");
    for (uint64_t round = 1; round < 4; round++) {
        CHECK_OK(spw_arena_post(arenas[0], 0, round, &stats, 0));
        INVALID(spw_arena_post(arenas[0], 0, round, &stats, 0), "round");
        REFUSED(spw_arena_wait_verdict(arenas[1], round, 0, &verdict), SPW_ERR_TIMEOUT, "process 1 has not posted");
        CHECK_OK(spw_arena_post(arenas[1], 1, round, &stats, round == 2));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(spw_arena_wait_verdict(arenas[i], round, FOREVER, &verdict));
            CHECK(verdict.sum_squares == 5.0 && !verdict.nonfinite && verdict.failed == (round == 2));
        }
    }
    // A process that leaves an open round aborts it for all; a decided round stays decided.
    uint32_t decided = 77;
    CHECK_OK(spw_arena_post(arenas[0], 0, 4, &stats, 0));
    INVALID(spw_arena_post(arenas[0], 0, 5, &stats, 0), "round 4 is open");
    CHECK_OK(spw_arena_abort_round(arenas[0], 0, 4, &decided, &verdict));
    CHECK(decided == 0);
    CHECK_OK(spw_arena_post(arenas[1], 1, 4, &stats, 0));
    for (int i = 0; i < 2; i++) {
        REFUSED(spw_arena_wait_verdict(arenas[i], 4, FOREVER, &verdict), SPW_ERR_ARENA_PEER_ENDED, "left the round");
    }
    CHECK_OK(spw_arena_abort_round(arenas[1], 1, 3, &decided, &verdict));
    CHECK(decided == 1 && verdict.sum_squares == 5.0);
    INVALID(spw_arena_abort_round(arenas[1], 0, 5, &decided, &verdict), "has not joined");
    INVALID(spw_arena_abort_round(arenas[1], 1, 0, &decided, &verdict), "round");
    INVALID(spw_arena_abort_round(arenas[1], 1, 5, NULL, &verdict), "decided_out");
    INVALID(spw_arena_abort_round(arenas[1], 1, 5, &decided, NULL), "verdict_out");
    CHECK_OK(spw_arena_close(arenas[1]));
    CHECK_OK(spw_arena_close(arenas[0]));
}

// A descriptor that crosses a socket opens the arena; a descriptor of anything else does not.
static void check_descriptors(void) {
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    spw_arena *arena = NULL, *other = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arena, &info));
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    char byte = 'x', room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &info.fd, sizeof(int));
    CHECK(sendmsg(ends[0], &message, 0) == 1);
    CHECK(recvmsg(ends[1], &message, 0) == 1);
    int received = -1;
    memcpy(&received, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
    CHECK(received >= 0 && received != info.fd);
    CHECK_OK(spw_arena_open_fd(received, SPW_ARENA_OPEN_FLAG_WRITE, &other));
    CHECK_OK(spw_arena_close(arena));
    // The received descriptor holds no lock: the owner's end is seen while it is open.
    CHECK_OK(spw_arena_get_info(other, &info));
    CHECK(!info.owner_lives);
    CHECK_OK(spw_arena_close(other));
    REFUSED(spw_arena_open_fd(received, 0, &other), SPW_ERR_ARENA_PEER_ENDED, "has ended");
    CHECK(ftruncate(received, 0) != 0);
    close(received);
    INVALID(spw_arena_open_fd(received, 0, &other), "fd");
    INVALID(spw_arena_open_fd(-1, 0, &other), "fd");
    REFUSED(spw_arena_open_fd(ends[0], 0, &other), SPW_ERR_ARENA_FORMAT, "not shared memory");
    const int bare = memfd_create("bare", 0);
    CHECK(bare >= 0 && ftruncate(bare, 1 << 20) == 0);
    REFUSED(spw_arena_open_fd(bare, 0, &other), SPW_ERR_ARENA_FORMAT, "F_SEAL_SHRINK");
    close(bare), close(ends[0]), close(ends[1]);
}

static void check_foreign_segments(void) {
    spw_arena *arena = NULL;
    const int fd = open(path, O_CREAT | O_RDWR | O_EXCL, 0600);
    CHECK(fd >= 0);
    REFUSED(spw_arena_open(name, 0, 0, &arena), SPW_ERR_ARENA_MISSING, "not completed");
    CHECK(write(fd, "not an arena", 12) == 12);
    REFUSED(spw_arena_open(name, 0, 0, &arena), SPW_ERR_ARENA_FORMAT, "fewer than a header");
    CHECK(ftruncate(fd, 1 << 20) == 0);
    REFUSED(spw_arena_open(name, 0, 0, &arena), SPW_ERR_ARENA_FORMAT, "magic");
    spw_arena_region regions[3];
    spw_arena_options options = three_regions(regions);
    options.name = name;
    // A file that is no arena stays. One that an owner did not complete is removed on request.
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_ARENA_FORMAT, "it stays");
    options.flags = SPW_ARENA_FLAG_COLLECT;
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_ARENA_FORMAT, "it stays");
    REFUSED(spw_arena_collect(name), SPW_ERR_ARENA_FORMAT, "it stays");
    CHECK(pwrite(fd, "\0\0\0\0\0\0\0\0\0\0\0\0", 12, 0) == 12);
    options.flags = 0;
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_ARENA_EXISTS, "left it behind");
    options.flags = SPW_ARENA_FLAG_COLLECT;
    CHECK_OK(spw_arena_create(&options, &arena));
    CHECK(link(path, "/dev/shm/spillway-second") == 0);
    spw_arena *other = NULL;
    REFUSED(spw_arena_open(name, 0, 0, &other), SPW_ERR_ARENA_FOREIGN, "hard links");
    CHECK(unlink("/dev/shm/spillway-second") == 0);
    CHECK(truncate(path, 8192) == 0);
    REFUSED(spw_arena_open(name, 0, 0, &other), SPW_ERR_ARENA_FORMAT, "truncated or extended");
    CHECK_OK(spw_arena_close(arena));
    CHECK(symlink("/dev/null", path) == 0);
    REFUSED(spw_arena_create(&options, &arena), SPW_ERR_ARENA_FOREIGN, "symbolic link");
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
    REFUSED(spw_arena_collect(name), SPW_ERR_ARENA_FOREIGN, "not a regular file of this user alone: it is a FIFO");
    CHECK(unlink(path) == 0);
    close(fd);
}

static void check_arguments(void) {
    spw_arena_region regions[3];
    const spw_arena_options good = three_regions(regions);
    spw_arena_options options = good;
    spw_arena *arena = NULL;
    INVALID(spw_arena_create(NULL, &arena), "options");
    INVALID(spw_arena_create(&options, NULL), "arena_out");
    options.flags = 8;
    INVALID(spw_arena_create(&options, &arena), "options.flags");
    options = good, options.region_count = 0;
    INVALID(spw_arena_create(&options, &arena), "options.region_count");
    options = good, options.regions = NULL;
    INVALID(spw_arena_create(&options, &arena), "options.regions");
    options = good, options.processes = 4097;
    INVALID(spw_arena_create(&options, &arena), "options.processes");
    options = good, options.name = "no/slash";
    INVALID(spw_arena_create(&options, &arena), "options.name");
    regions[1].bytes = UINT64_MAX;
    INVALID(spw_arena_create(&good, &arena), "options.regions[1].bytes");
    regions[1].bytes = 1, regions[1].name = NULL;
    INVALID(spw_arena_create(&good, &arena), "options.regions[1].name");
    regions[1].name = "first";
    INVALID(spw_arena_create(&good, &arena), "options.regions[1].name");
    INVALID(spw_arena_open(NULL, 0, 0, &arena), "name");
    INVALID(spw_arena_open("x", 4, 0, &arena), "flags");
    INVALID(spw_arena_open("../x", 0, 0, &arena), "name");
    INVALID(spw_arena_get_info(NULL, NULL), "arena");
    INVALID(spw_arena_write_end(NULL, 0), "arena");
    CHECK_OK(spw_arena_close(NULL));
    CHECK(arena == NULL);
}

int main(void) {
    snprintf(name, sizeof name, "test-%d", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/spillway-%s", name);
    check_failed_creates();
    check_regions();
    check_reads_and_writes();
    check_verdicts();
    check_descriptors();
    check_foreign_segments();
    check_arguments();
    return 0;
}
