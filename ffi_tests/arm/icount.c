// A qemu plugin. It counts the instructions that a program executes in the functions whose name contains a given word,
// and finds the loop that executes most of them.
//
//   qemu-aarch64 -plugin icount.so,in=WORD,out=FILE PROGRAM      FILE: instructions, loop start, loop end
//
// This file declares the few parts of qemu's plugin interface that it uses, so no qemu header is needed.

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { ADD_U64 = 0 };

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *sum, uint64_t amount);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
const char *qemu_plugin_insn_symbol(const struct qemu_plugin_insn *);

EXPORT int qemu_plugin_version = 1;

// A sequence of instructions without a branch, as qemu translates it.
struct block {
    uint64_t start, instructions, executions;
    struct block *next;
};

static const char *word = "", *path;
static struct block *blocks;

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
    (void)id;
    const struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(tb, 0);
    const char *symbol = qemu_plugin_insn_symbol(first);
    if (!symbol || !strstr(symbol, word))
        return;
    // Never freed or moved: translated code writes the counter until the end.
    struct block *block = calloc(1, sizeof *block);
    if (!block)
        abort();
    block->start = qemu_plugin_insn_vaddr(first);
    block->instructions = qemu_plugin_tb_n_insns(tb);
    block->next = blocks;
    blocks = block;
    qemu_plugin_register_vcpu_tb_exec_inline(tb, ADD_U64, &block->executions, 1);
}

static void finished(plugin_id id, void *user)
{
    (void)id;
    (void)user;
    uint64_t total = 0, most = 0, start = UINT64_MAX, end = 0;
    for (struct block *block = blocks; block; block = block->next) {
        total += block->instructions * block->executions;
        most = block->executions > most ? block->executions : most;
    }
    // A loop that crosses a page consists of two blocks, and the block before it contains its first iteration.
    for (struct block *block = blocks; block; block = block->next) {
        if (block->executions < most - most / 8)
            continue;
        start = block->start < start ? block->start : start;
        uint64_t after = block->start + 4 * block->instructions;
        end = after > end ? after : end;
    }
    FILE *file = fopen(path, "w");
    if (!file)
        abort();
    fprintf(file, "%" PRIu64 " 0x%" PRIx64 " 0x%" PRIx64 "\n", total, start, end);
    fclose(file);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int count, char **arguments)
{
    (void)info;
    for (int i = 0; i < count; i++) {
        if (!strncmp(arguments[i], "in=", 3))
            word = strdup(arguments[i] + 3);
        else if (!strncmp(arguments[i], "out=", 4))
            path = strdup(arguments[i] + 4);
        else
            return 1;
    }
    if (!path)
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
