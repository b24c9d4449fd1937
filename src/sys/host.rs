//! Identity of this machine and of its processes.

use std::io::{self, Read};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// The host name; empty if unreadable.
pub fn name() -> String {
    text("/proc/sys/kernel/hostname")
}

/// The machine id, empty if the machine has none. Two machines may have the same host name.
pub fn machine() -> String {
    text("/etc/machine-id")
}

/// The boot id, which is unique to each boot of the machine.
pub fn boot() -> String {
    text("/proc/sys/kernel/random/boot_id")
}

fn text(path: &str) -> String {
    std::fs::read_to_string(path).map_or_else(|_| String::new(), |text| text.trim().to_string())
}

/// The pid namespace in which this process's id is valid: a container may have a namespace of its own.
pub fn pid_namespace() -> String {
    std::fs::read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |id| id.display().to_string())
}

/// Start time of a process, in clock ticks since boot; `None` if there is no such process.
pub fn process_start(pid: u32) -> Option<u64> {
    Some(ended_and_start(pid)?.1)
}

/// True if the process with id `pid` and start time `start` has ended. A zombie has ended unless it has other live
/// threads. A process that /proc hides has not ended.
pub fn process_ended(pid: u32, start: u64) -> bool {
    match ended_and_start(pid) {
        Some((_, found)) if found != start => true,
        Some((true, _)) => {
            std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() <= 1)
        }
        Some(_) => false,
        None => i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH)),
    }
}

/// Whether the process's main thread has ended, and the start time of the process.
fn ended_and_start(pid: u32) -> Option<(bool, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold any character. The fields after it are the state letter and numbers; the start
    // time is the 20th.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    Some((ended, fields.nth(18)?.parse().ok()?))
}

/// Random bits from /dev/urandom.
pub fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_ended_once_it_is_a_zombie() {
        let me = std::process::id();
        assert!(!process_ended(me, process_start(me).unwrap()));
        assert!(process_ended(me, process_start(me).unwrap() + 1));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, start) = (child.id(), process_start(child.id()).unwrap());
        assert!(!process_ended(pid, start));
        child.kill().unwrap();
        while !process_ended(pid, start) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(process_ended(pid, start) && process_start(pid).is_none());
    }
}
