// Children that a test forks.

#ifndef SPILLWAY_CHILD_H
#define SPILLWAY_CHILD_H

#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

// A child that waits for a thread that fork did not copy would wait forever.
enum { PATIENCE_SECONDS = 60 };

// Waits for a child, which must exit with 0.
static inline void finish(pid_t child, const char *what) {
    int outcome = 0;
    CHECK(child >= 0 && waitpid(child, &outcome, 0) == child);
    if (outcome != 0) {
        fail(__FILE__, __LINE__, "%s: the child ended with %#x%s", what, (unsigned)outcome,
             WIFSIGNALED(outcome) && WTERMSIG(outcome) == SIGALRM ? ", it hung" : "");
    }
}

// Does `work` in a child.
static inline void in_child(void (*work)(void), const char *what) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE_SECONDS);
        work();
        _exit(0);
    }
    finish(child, what);
}

#endif
