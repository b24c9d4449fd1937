// Proves that the topology of a recorded machine is that of its files and of hwloc: four superchips of 72 cores, each with a
// GPU, and ranks on the cores of their GPUs. A root without the directory sys is refused, and
// refused calls write nothing. A prefetch takes any number. A system that binds no thread is an error of the system.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <spillway/topo.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHIPS = 4, CORES = 72 };

static char root[] = "topo-XXXXXX";

static void put(const char *text, const char *format, ...) {
    char path[512];
    int length = snprintf(path, sizeof path, "%s/", root);
    va_list values;
    va_start(values, format);
    vsnprintf(path + length, sizeof path - (size_t)length, format, values);
    va_end(values);
    for (char *slash = path + 1; (slash = strchr(slash, '/')) != NULL; slash++) {
        *slash = '\0';
        CHECK(mkdir(path, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL && fprintf(file, "%s\n", text) > 0 && fclose(file) == 0);
}

// The mask of processors from `first` on, as the kernel writes it: words of 32 bits, the highest first.
static const char *mask(int first, int count) {
    static char text[128];
    size_t length = 0;
    for (int word = CHIPS * CORES / 32 - 1; word >= 0; word--) {
        uint32_t bits = 0;
        for (int bit = 0; bit < 32; bit++) {
            const int cpu = word * 32 + bit;
            if (cpu >= first && cpu < first + count) bits |= UINT32_C(1) << bit;
        }
        length += (size_t)snprintf(text + length, sizeof text - length, "%08x%s", bits, word > 0 ? "," : "");
    }
    return text;
}

static void write_machine(void) {
    char number[16], memory[64];
    CHECK(mkdtemp(root) != NULL);
    for (const char *const *name = (const char *const[]){"online", "possible", "present", NULL}; *name; name++) {
        put("0-287", "sys/devices/system/cpu/%s", *name);
    }
    put("0-3", "sys/devices/system/node/online");
    for (int cpu = 0; cpu < CHIPS * CORES; cpu++) {
        snprintf(number, sizeof number, "%d", cpu / CORES);
        put(number, "sys/devices/system/cpu/cpu%d/topology/physical_package_id", cpu);
        put(mask(cpu / CORES * CORES, CORES), "sys/devices/system/cpu/cpu%d/topology/package_cpus", cpu);
        put(mask(cpu / CORES * CORES, CORES), "sys/devices/system/cpu/cpu%d/topology/core_siblings", cpu);
        put(mask(cpu, 1), "sys/devices/system/cpu/cpu%d/topology/core_cpus", cpu);
        put(mask(cpu, 1), "sys/devices/system/cpu/cpu%d/topology/thread_siblings", cpu);
        snprintf(number, sizeof number, "%d", cpu % CORES);
        put(number, "sys/devices/system/cpu/cpu%d/topology/core_id", cpu);
    }
    for (int chip = 0; chip < CHIPS; chip++) {
        put(mask(chip * CORES, CORES), "sys/devices/system/node/node%d/cpumap", chip);
        snprintf(memory, sizeof memory, "Node %d MemTotal: %lld kB", chip, 480LL << 20);
        put(memory, "sys/devices/system/node/node%d/meminfo", chip);
        snprintf(memory, sizeof memory, "%d %d %d %d", chip ? 40 : 10, chip == 1 ? 10 : 40, chip == 2 ? 10 : 40,
                 chip == 3 ? 10 : 40);
        put(memory, "sys/devices/system/node/node%d/distance", chip);
        snprintf(number, sizeof number, "%d", chip);
        const char *const texts[][2] = {
            {"class", "0x030200"}, {"vendor", "0x10de"}, {"device", "0x2342"}, {"numa_node", number}};
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            put(texts[i][1], "sys/bus/pci/devices/000%d:01:00.0/%s", chip, texts[i][0]);
        }
    }
}

static void parts_are_those_of_the_files(const spw_topo *topo) {
    spw_topo_info info = SPW_TOPO_INFO_INIT;
    CHECK_OK(spw_topo_get_info(topo, &info));
    CHECK(info.processors == CHIPS * CORES && info.cores == CHIPS * CORES && info.packages == CHIPS);
    CHECK(info.nodes == CHIPS && info.gpus == CHIPS && info.drives == 0 && info.bound == 0);
    CHECK(strcmp(info.allowed, "0-287") == 0);
    for (uint32_t chip = 0; chip < CHIPS; chip++) {
        char cpus[32], pci[32];
        snprintf(cpus, sizeof cpus, "%u-%u", chip * CORES, chip * CORES + CORES - 1);
        snprintf(pci, sizeof pci, "000%u:01:00.0", chip);
        spw_topo_node node = SPW_TOPO_NODE_INIT;
        spw_topo_gpu gpu = SPW_TOPO_GPU_INIT;
        CHECK_OK(spw_topo_get_node(topo, chip, &node));
        CHECK(node.node == chip && node.kind == SPW_TOPO_NODE_KIND_DRAM && node.memory_bytes == UINT64_C(480) << 30);
        CHECK(strcmp(node.cpus, cpus) == 0 && strcmp(node.near_cpus, cpus) == 0);
        CHECK_OK(spw_topo_get_gpu(topo, chip, &gpu));
        CHECK(gpu.node == chip && gpu.memory_node == SPW_TOPO_NONE && strcmp(gpu.pci, pci) == 0);
        CHECK(strcmp(gpu.cpus, cpus) == 0);
        spw_topo_rank_options rank = SPW_TOPO_RANK_OPTIONS_INIT;
        char text[64];
        uint64_t needed;
        rank.ranks = CHIPS;
        rank.rank = chip;
        CHECK_OK(spw_topo_get_rank_cpus(topo, &rank, SPW_TOPO_CPUS_ALL, text, sizeof text, &needed));
        CHECK(strcmp(text, cpus) == 0 && needed == strlen(cpus) + 1);
        // A fifth of 72 cores is the trainer's: 14.
        snprintf(cpus, sizeof cpus, "%u-%u", chip * CORES, chip * CORES + 13);
        CHECK_OK(spw_topo_get_rank_cpus(topo, &rank, SPW_TOPO_CPUS_TRAINER, text, sizeof text, NULL));
        CHECK(strcmp(text, cpus) == 0);
        snprintf(cpus, sizeof cpus, "%u-%u", chip * CORES + 14, chip * CORES + CORES - 1);
        CHECK_OK(spw_topo_get_rank_cpus(topo, &rank, SPW_TOPO_CPUS_WORKERS, text, sizeof text, NULL));
        CHECK(strcmp(text, cpus) == 0);
    }
    uint64_t needed = 0;
    char few[8] = "xxxxxxx";
    CHECK_OK(spw_topo_get_json(topo, few, sizeof few, &needed));
    CHECK(needed > 1000 && strlen(few) == 7 && few[0] == '{');
}

static void refused_calls_write_nothing(const spw_topo *topo) {
    spw_topo_node node = SPW_TOPO_NODE_INIT;
    spw_topo_gpu gpu = SPW_TOPO_GPU_INIT;
    spw_topo_rank_options rank = SPW_TOPO_RANK_OPTIONS_INIT;
    uint32_t number = 7;
    char text[8] = "before";
    watch(&node, sizeof node);
    watch(&gpu, sizeof gpu);
    watch(&number, sizeof number);
    watch(text, sizeof text);
    INVALID(spw_topo_get_node(topo, CHIPS, &node), "there are 4 nodes");
    INVALID(spw_topo_get_gpu(topo, CHIPS, &gpu), "4 GPUs are visible");
    INVALID(spw_topo_get_node(NULL, 0, &node), "topo");
    INVALID(spw_topo_get_rank_cpus(topo, &rank, 3, text, sizeof text, NULL), "cpus: 3 is not");
    rank.ranks = rank.rank = 2;
    INVALID(spw_topo_get_rank_cpus(topo, &rank, 0, text, sizeof text, NULL), "options.rank: is 2");
    rank.share = 1.5;
    INVALID(spw_topo_get_rank_cpus(topo, &rank, 0, text, sizeof text, NULL), "options.share");
    INVALID(spw_topo_prefetch(NULL, 1), "addresses: is NULL");
    REFUSED(spw_topo_get_path_node(topo, "/no/such/path", &number), SPW_ERR_NOT_FOUND, "/no/such/path");
    unwatch_all();
}

static void a_prefetch_takes_any_number(void) {
    uint64_t addresses[] = {0, 1, (uintptr_t)addresses, 1ull << 47, 1ull << 63, UINT64_MAX};
    CHECK_OK(spw_topo_prefetch(addresses, sizeof addresses / sizeof *addresses));
    CHECK_OK(spw_topo_prefetch(NULL, 0));
}

static void a_root_without_sys_is_refused(void) {
    char path[512];
    spw_topo_options options = SPW_TOPO_OPTIONS_INIT;
    spw_topo *topo = (spw_topo *)&options;
    watch(&topo, sizeof topo);
    for (const char *const *name = (const char *const[]){"sys", "absent", "sys/devices/system/node/online", NULL}; *name;
         name++) {
        snprintf(path, sizeof path, "%s/%s", root, *name);
        options.root = path;
        INVALID(spw_topo_open(&options, &topo), "has no directory sys; name the directory of a recorded tree");
        CHECK(strncmp(spw_last_error(), "options.root: ", 14) == 0);
    }
    unwatch_all();
    options.root = "/";
    CHECK_OK(spw_topo_open(&options, &topo));
    CHECK_OK(spw_topo_close(topo));
}

// hwloc reads the same files, and writes them as XML.
static void hwloc_says_the_same(void) {
    char command[256], line[4096];
    snprintf(command, sizeof command,
             "lstopo-no-graphics --input %s --if fsroot --of xml --whole-io - 2>/dev/null", root);
    FILE *xml = popen(command, "r");
    CHECK(xml != NULL);
    int packages = 0, cores = 0, nodes = 0, gpus = 0;
    while (fgets(line, sizeof line, xml) != NULL) {
        packages += strstr(line, "type=\"Package\"") != NULL;
        cores += strstr(line, "type=\"Core\"") != NULL;
        nodes += strstr(line, "type=\"NUMANode\"") != NULL && strstr(line, "local_memory=\"515396075520\"") != NULL;
        gpus += strstr(line, "pci_type=\"0302 [10de:2342]") != NULL;
    }
    if (pclose(xml) != 0) fail(__FILE__, __LINE__, "lstopo failed; install hwloc-nox");
    CHECK(packages == CHIPS && cores == CHIPS * CORES && nodes == CHIPS && gpus == CHIPS);
}

// The last of all, because the process cannot bind threads any more.
static void a_system_that_refuses_is_no_wrong_argument(const spw_topo *topo) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_setaffinity, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) return;
    REFUSED(spw_topo_bind_workers(topo, "0"), SPW_ERR_SYSTEM, "asking the system for the processors");
}

int main(void) {
    write_machine();
    unsetenv("CUDA_VISIBLE_DEVICES");
    spw_topo_options options = SPW_TOPO_OPTIONS_INIT;
    spw_topo *topo;
    options.root = root;
    CHECK_OK(spw_topo_open(&options, &topo));
    parts_are_those_of_the_files(topo);
    refused_calls_write_nothing(topo);
    a_prefetch_takes_any_number();
    a_root_without_sys_is_refused();
    hwloc_says_the_same();
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
    a_system_that_refuses_is_no_wrong_argument(topo);
    CHECK_OK(spw_topo_close(topo));
    return 0;
}
