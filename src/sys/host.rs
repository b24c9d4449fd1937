//! Which machine and which process this is.

use std::io::{self, Read};

/// The machine's name.
pub fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| String::new(), |name| name.trim().to_string())
}

/// The machine's own number, empty where it has none; names of machines are not always their own.
pub fn machine() -> String {
    std::fs::read_to_string("/etc/machine-id").map_or_else(|_| String::new(), |id| id.trim().to_string())
}

/// A number that every start of the machine has for itself.
pub fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_string())
}

/// Where this process's id means anything: a container may have ids of its own.
pub fn pid_namespace() -> String {
    std::fs::read_link("/proc/self/ns/pid").map_or_else(|_| String::new(), |id| id.display().to_string())
}

/// When a process began, in clock ticks since the machine did; `None` if there is no such process.
pub fn process_start(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the fields after it are numbers, the start is the 20th.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Random bits from the system.
pub fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}
