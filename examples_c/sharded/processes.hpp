// Processes of one training run: started by a launcher, and joined by memory that they share. A real run has
// NCCL, gloo or MPI in this place.

#ifndef PROCESSES_HPP
#define PROCESSES_HPP

#include <csignal>
#include <cstdio>
#include <exception>
#include <set>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

// What a process knows of its run. `Shared` is the memory of all processes; it starts as zeros.
template <class Shared>
struct group {
    unsigned rank;
    unsigned size;
    Shared *shared;
    pthread_barrier_t *meeting;

    // Returns once every process has called it. Everything that was written to `shared` before is then visible.
    void barrier() const { pthread_barrier_wait(meeting); }
};

// Runs `work` in a process of the group, and returns the exit status of the process.
template <class Shared, class Work>
int member(Work &work, const group<Shared> &all) {
    int status = 0;
    try {
        work(all);
    } catch (const std::exception &problem) {
        std::fprintf(stderr, "rank %u: %s\n", all.rank, problem.what());
        status = 1;
    }
    std::fflush(nullptr);
    return status;
}

// Runs `work` in `size` processes and returns the exit status of the run. If a process fails or is killed, the launcher
// kills the others, which would wait for it forever. The processes end with the launcher.
template <class Shared, class Work>
int launch(unsigned size, Work work) {
    struct memory {
        pthread_barrier_t meeting;
        Shared shared;
    };
    void *mapped = mmap(nullptr, sizeof(memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        std::perror("mmap");
        return 1;
    }
    auto *all = static_cast<memory *>(mapped);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&all->meeting, &attributes, size);

    const pid_t launcher = getpid();
    std::set<pid_t> members;
    bool failed = false;
    for (unsigned rank = 0; rank < size && !failed; rank++) {
        const pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(getppid() == launcher ? member(work, group<Shared>{rank, size, &all->shared, &all->meeting}) : 1);
        } else if (child > 0) {
            members.insert(child);
            std::printf("rank %u is process %d\n", rank, static_cast<int>(child));
            std::fflush(stdout);
        } else {
            std::perror("fork");
            failed = true;
        }
    }
    while (!members.empty()) {
        if (failed) {
            for (pid_t one : members) {
                kill(one, SIGKILL);
            }
        }
        int status = 0;
        const pid_t ended = waitpid(-1, &status, 0);
        members.erase(ended);
        if (status != 0 && !failed) {
            std::fprintf(stderr, "process %d failed, and the run ends; start it again to continue at its last step\n", static_cast<int>(ended));
            failed = true;
        }
    }
    return failed ? 1 : 0;
}

#endif // PROCESSES_HPP
