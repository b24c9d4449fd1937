// Runs as the first process of a machine with three NUMA nodes (run.sh): processors 0-1 on node 0, 2-3 on node 1, and
// memory alone on node 2. Proves that the topology is the machine's, that a pool lies on the node that it is bound to,
// that a pool too large for its node ends no process, that the share of remote pages is exact, that the buffers of a tiered
// update and the pages of a memory path lie on the node that was asked for, and that workers run where they are bound. The last line is "passed", or the first check that failed.

#define SPW_EXPERIMENTAL
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <fcntl.h>
#include <spillway.h>
#include <spillway/topo.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, MIB = 1 << 20, MOVE = 2 };

static void end(const char *words) {
    printf("%s\n", words);
    fflush(stdout);
    sync();
    reboot(RB_POWER_OFF);
    _exit(1);
}

#define CHECK(condition) ((condition) ? (void)0 : failed(__LINE__, #condition))
#define CHECK_OK(call) CHECK((call) == SPW_OK)

static void failed(int line, const char *condition) {
    char text[1024];
    snprintf(text, sizeof text, "guest.c:%d: %s (last error: %s)", line, condition, spw_last_error());
    end(text);
}

static spw_topo_pages pages(const void *address, size_t bytes, uint32_t node) {
    spw_topo_pages found = SPW_TOPO_PAGES_INIT;
    CHECK_OK(spw_topo_get_pages(address, bytes, node, &found));
    return found;
}

// The pages of a mapping on a node, as the kernel counts them: "ADDRESS bind:1 anon=16 N1=16 kernelpagesize_kB=4".
static unsigned long counted(const void *address, uint32_t node, int *bound) {
    char line[1024], name[32], policy[32];
    snprintf(name, sizeof name, " N%u=", node);
    snprintf(policy, sizeof policy, " bind:%u ", node);
    FILE *maps = fopen("/proc/self/numa_maps", "r");
    CHECK(maps != NULL);
    unsigned long count = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        if (strtoul(line, NULL, 16) != (unsigned long)(uintptr_t)address) continue;
        const char *found = strstr(line, name), *page = strstr(line, "kernelpagesize_kB=");
        CHECK(page != NULL);
        *bound = strstr(line, policy) != NULL;
        count = found == NULL ? 0 : strtoul(found + strlen(name), NULL, 10) * (strtoul(page + 18, NULL, 10) / 4);
    }
    fclose(maps);
    return count;
}

static void nodes_are_the_machines(const spw_topo *topo) {
    spw_topo_info info = SPW_TOPO_INFO_INIT;
    CHECK_OK(spw_topo_get_info(topo, &info));
    CHECK(info.nodes == 3 && info.processors == 4 && info.packages == 2 && strcmp(info.allowed, "0-3") == 0);
    static const char *const cpus[] = {"0-1", "2-3", ""};
    for (uint32_t index = 0; index < 3; index++) {
        spw_topo_node node = SPW_TOPO_NODE_INIT;
        CHECK_OK(spw_topo_get_node(topo, index, &node));
        CHECK(node.node == index && node.allowed == 1 && strcmp(node.cpus, cpus[index]) == 0);
        CHECK(node.memory_bytes > 100 * (uint64_t)MIB && node.memory_bytes <= 384 * (uint64_t)MIB);
        CHECK((node.kind == SPW_TOPO_NODE_KIND_DRAM) == (index < 2));
        // Node 1 is nearer to node 2 than node 0 is.
        CHECK(index != 2 || strcmp(node.near_cpus, "2-3") == 0);
    }
    for (uint32_t rank = 0; rank < 2; rank++) {
        spw_topo_rank_options options = SPW_TOPO_RANK_OPTIONS_INIT;
        char text[64];
        options.ranks = 2;
        options.rank = rank;
        CHECK_OK(spw_topo_get_rank_cpus(topo, &options, SPW_TOPO_CPUS_ALL, text, sizeof text, NULL));
        CHECK(strcmp(text, cpus[rank]) == 0);
    }
}

// The thread touches the memory from the processors of node 0.
static void an_allocation_lies_on_its_node(uint32_t node, uint32_t flags) {
    const spw_pinned_options options = {
        .struct_size = sizeof options, .flags = SPW_PINNED_FLAG_BIND_NODE | flags, .node = node};
    void *start;
    for (int i = 0; i < 4; i++) {
        CHECK_OK(spw_pinned_alloc(&options, 8 * MIB, &start));
        memset(start, i + 1, 8 * MIB);
        const spw_topo_pages here = pages(start, 8 * MIB, node), there = pages(start, 8 * MIB, (node + 1) % 3);
        CHECK(here.sampled == 8 * MIB / PAGE && here.on_node == here.sampled && here.elsewhere == 0);
        CHECK(there.on_node == 0 && there.elsewhere == there.sampled);
        int bound;
        const unsigned long own = counted(start, node, &bound);
        CHECK(own == 0 || (bound && own >= 8 * MIB / PAGE));
        CHECK_OK(spw_pinned_free(start));
    }
}

// 320 MiB do not fit on a node of 256, although the machine has them. A bound mapping would end this process.
static void a_node_without_room_is_left_out(void) {
    const spw_pinned_options options = {
        .struct_size = sizeof options, .flags = SPW_PINNED_FLAG_BIND_NODE | SPW_PINNED_FLAG_NO_LOCK, .node = 2};
    void *start;
    CHECK_OK(spw_pinned_alloc(&options, 320 * (uint64_t)MIB, &start));
    memset(start, 1, 320 * (size_t)MIB);
    CHECK(pages(start, 320 * (size_t)MIB, 2).elsewhere > 0);
    CHECK_OK(spw_pinned_free(start));
}

// The pages of all mappings that are bound to a node: those there, and all of them.
struct bound {
    unsigned long here, all;
};

static struct bound bound_to(uint32_t node) {
    char line[1024], policy[32];
    snprintf(policy, sizeof policy, " bind:%u ", node);
    FILE *maps = fopen("/proc/self/numa_maps", "r");
    CHECK(maps != NULL);
    struct bound sum = {0, 0};
    while (fgets(line, sizeof line, maps) != NULL) {
        const char *page = strstr(line, "kernelpagesize_kB=");
        if (strstr(line, policy) == NULL || page == NULL) continue;
        const unsigned long scale = strtoul(page + 18, NULL, 10) / 4;
        for (char *found = line; (found = strstr(found, " N")) != NULL;) {
            char *end;
            const unsigned long on = strtoul(found + 2, &end, 10);
            found = end;
            if (*end != '=') continue;
            const unsigned long count = strtoul(end + 1, NULL, 10) * scale;
            sum.all += count;
            if (on == node) sum.here += count;
        }
    }
    fclose(maps);
    return sum;
}

// The pages of the files in memory of this process: those on a node, and all of them.
static struct bound in_files_on(uint32_t node) {
    struct bound sum = {0, 0};
    DIR *files = opendir("/proc/self/fd");
    CHECK(files != NULL);
    char seen[4096] = "";
    for (struct dirent *file; (file = readdir(files)) != NULL;) {
        char path[300], target[64] = "", key[64];
        struct stat found;
        snprintf(path, sizeof path, "/proc/self/fd/%s", file->d_name);
        if (readlink(path, target, sizeof target - 1) < 0 || strncmp(target, "/memfd:spillway", 15) != 0) continue;
        CHECK(stat(path, &found) == 0);
        // Several descriptors have one file.
        snprintf(key, sizeof key, " %lu ", (unsigned long)found.st_ino);
        if (found.st_blocks == 0 || strstr(seen, key) != NULL) continue;
        strncat(seen, key, sizeof seen - strlen(seen) - 1);
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0);
        const size_t bytes = (size_t)found.st_size / PAGE * PAGE;
        volatile const char *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(memory != MAP_FAILED);
        char sink = 0;
        for (size_t at = 0; at < bytes; at += PAGE) sink ^= memory[at];
        (void)sink;
        // Parts, because more pages than that are sampled.
        for (size_t at = 0; at < bytes; at += 4 * MIB) {
            const size_t part = bytes - at < 4 * MIB ? bytes - at : 4 * MIB;
            const spw_topo_pages there = pages((const char *)memory + at, part, node);
            sum.here += there.on_node;
            sum.all += there.on_node + there.elsewhere;
        }
        munmap((void *)memory, bytes);
        close(fd);
    }
    closedir(files);
    return sum;
}

// Reads and writes come from the processors of node 0.
static void an_update_and_its_memory_path_lie_on_their_nodes(uint32_t buffers, uint32_t memory, uint32_t flags) {
    enum { SUBGROUPS = 4, ELEMENTS = 1 << 18 };
    spw_tier_path path = SPW_TIER_PATH_INIT;
    path.kind = SPW_TIER_PATH_KIND_MEMORY;
    path.flags = SPW_TIER_PATH_FLAG_NODE;
    path.node = memory;
    spw_tier_options options = SPW_TIER_OPTIONS_INIT;
    options.mode = SPW_TIER_MODE_CREATE;
    options.job = "numa";
    options.host = "guest";
    options.paths = &path;
    options.path_count = 1;
    options.block_bytes = 1 << 16;
    spw_tier *tier;
    CHECK_OK(spw_tier_open(&options, &tier));
    const uint64_t elements[SUBGROUPS] = {ELEMENTS, ELEMENTS, ELEMENTS, ELEMENTS};
    spw_swap_options settings = SPW_SWAP_OPTIONS_INIT;
    settings.flags = SPW_SWAP_FLAG_BIND_NODE | flags;
    settings.node = buffers;
    settings.elements = elements;
    settings.subgroups = SUBGROUPS;
    settings.host_memory = 32 * MIB;
    spw_swap *swap;
    CHECK(bound_to(buffers).all == 0);
    CHECK_OK(spw_swap_open(tier, &settings, &swap));
    const float *states[3 * SUBGROUPS] = {NULL};
    CHECK_OK(spw_swap_fill(swap, states));
    CHECK_OK(spw_swap_commit(swap, 1, NULL, 0));
    spw_swap_budget budget = SPW_SWAP_BUDGET_INIT;
    CHECK_OK(spw_swap_plan_budget(&settings, 1, &budget));
    const struct bound own = bound_to(buffers), stored = in_files_on(memory);
    printf("buffers on node %u: %lu of %lu pages; memory path on node %u: %lu of %lu\n", buffers, own.here, own.all,
           memory, stored.here, stored.all);
    CHECK(own.all >= (3 * sizeof(float) * ELEMENTS) / PAGE && own.here == own.all);
    CHECK(stored.all >= (3 * sizeof(float) * SUBGROUPS * ELEMENTS) / PAGE && stored.here == stored.all);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
    CHECK(bound_to(buffers).all == 0 && in_files_on(memory).all == 0);
}

static void the_share_of_remote_pages_is_exact(void) {
    enum { COUNT = 64, FAR = 24 };
    char *memory = mmap(NULL, COUNT * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && madvise(memory, COUNT * PAGE, MADV_NOHUGEPAGE) == 0);
    memset(memory, 1, (COUNT - 8) * PAGE);
    void *moved[FAR];
    int to[FAR], status[FAR];
    for (int i = 0; i < FAR; i++) {
        moved[i] = memory + 2 * i * PAGE;
        to[i] = 1;
    }
    CHECK(syscall(SYS_move_pages, 0, FAR, moved, to, status, MOVE) == 0);
    const spw_topo_pages near = pages(memory, COUNT * PAGE, 0), far = pages(memory, COUNT * PAGE, 1);
    CHECK(near.sampled == COUNT && near.on_node == COUNT - 8 - FAR && near.elsewhere == FAR && near.absent == 8);
    CHECK(far.on_node == FAR && far.elsewhere == COUNT - 8 - FAR && far.absent == 8);
    munmap(memory, COUNT * PAGE);
}

// The affinities of the threads other than this one, except threads with the affinity of this one.
static int all_workers_are_on(const char *list) {
    int workers = 0;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[64], line[256], found[64];
        if (task->d_name[0] == '.' || atoi(task->d_name) == getpid()) continue;
        snprintf(path, sizeof path, "/proc/self/task/%.20s/status", task->d_name);
        FILE *file = fopen(path, "r");
        while (file != NULL && fgets(line, sizeof line, file) != NULL) {
            if (sscanf(line, "Cpus_allowed_list: %63s", found) != 1) continue;
            if (strcmp(found, list) != 0) return closedir(tasks), 0;
            workers++;
        }
        if (file != NULL) fclose(file);
    }
    closedir(tasks);
    return workers;
}

static void workers_run_on_the_node_they_are_bound_to(const spw_topo *topo) {
    enum { COUNT = 1 << 20 };
    CHECK_OK(spw_topo_bind_workers(topo, "2-3"));
    float *values = calloc(4 * COUNT, sizeof *values);
    CHECK(values != NULL);
    spw_tensor tensor = {.struct_size = sizeof tensor, .n = COUNT};
    tensor.param_dtype = tensor.state_dtype = tensor.grad_dtype = SPW_DTYPE_F32;
    tensor.param = values;
    tensor.grad = values + COUNT;
    tensor.exp_avg = values + 2 * COUNT;
    tensor.exp_avg_sq = values + 3 * COUNT;
    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.step = 1;
    // A worker binds itself when it first runs.
    int workers = 0;
    for (int round = 0; round < 1000 && workers == 0; round++) {
        CHECK_OK(spw_adam_step(&options, &tensor, 1, NULL));
        workers = all_workers_are_on("2-3");
    }
    CHECK(workers >= 1);
    cpu_set_t own;
    CHECK(sched_getaffinity(0, sizeof own, &own) == 0 && CPU_COUNT(&own) == 2 && CPU_ISSET(0, &own));
    free(values);
    CHECK_OK(spw_topo_unbind_workers());
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    CHECK(mount("proc", "/proc", "proc", 0, NULL) == 0 && mount("sysfs", "/sys", "sysfs", 0, NULL) == 0);
    mkdir("/dev", 0755);
    CHECK(mount("devtmpfs", "/dev", "devtmpfs", 0, NULL) == 0);
    spw_topo *topo;
    CHECK_OK(spw_topo_open(NULL, &topo));
    nodes_are_the_machines(topo);
    cpu_set_t node0;
    CPU_ZERO(&node0);
    CPU_SET(0, &node0);
    CPU_SET(1, &node0);
    CHECK(sched_setaffinity(0, sizeof node0, &node0) == 0);
    for (uint32_t node = 0; node < 3; node++) {
        an_allocation_lies_on_its_node(node, 0);
        an_allocation_lies_on_its_node(node, SPW_PINNED_FLAG_NO_HUGE_PAGES | SPW_PINNED_FLAG_NO_LOCK);
    }
    the_share_of_remote_pages_is_exact();
    for (uint32_t node = 0; node < 3; node++) {
        an_update_and_its_memory_path_lie_on_their_nodes(node, (node + 1) % 3, 0);
        an_update_and_its_memory_path_lie_on_their_nodes(
            node, (node + 1) % 3, SPW_SWAP_FLAG_NO_HUGE_PAGES | SPW_SWAP_FLAG_NO_LOCK);
    }
    workers_run_on_the_node_they_are_bound_to(topo);
    a_node_without_room_is_left_out();
    CHECK_OK(spw_topo_close(topo));
    end("passed");
}
