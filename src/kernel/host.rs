//! What this process may do here.

use std::fs;
use std::io;
use std::path::Path;

use super::BTF_DIR;
use crate::error::{Capability, Lockdown};

/// Whether this process lacks a capability. Where `/proc` doesn't tell, it is taken to have it: the kernel decides.
pub(crate) fn lacks(capability: Capability) -> bool {
    holds(capability) == Some(false)
}

/// Whether this process has a capability, where `/proc` tells.
pub(crate) fn holds(capability: Capability) -> Option<bool> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    effective(&status).map(|set| set >> capability.bit() & 1 == 1)
}

/// The effective capability set, from the text of `/proc/PID/status`.
fn effective(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// Whether this process is in a user namespace of its own, where its capabilities don't count for tracing.
pub(crate) fn in_user_namespace() -> bool {
    user_namespace() == Some(true)
}

/// The same, where `/proc` tells.
pub(crate) fn user_namespace() -> Option<bool> {
    fs::read_to_string("/proc/self/uid_map").ok().map(|map| is_partial_map(&map))
}

/// The initial namespace maps every uid to itself: `0 0 4294967295`.
fn is_partial_map(uid_map: &str) -> bool {
    let mut words = uid_map.split_whitespace().map(str::parse);
    let all = [Some(Ok(0)), Some(Ok(0)), Some(Ok(u32::MAX)), None];
    !uid_map.is_empty() && all != [words.next(), words.next(), words.next(), words.next()]
}

/// `RLIMIT_MEMLOCK`, where it bounds what this process's user may have of maps and programs. That is so before Linux
/// 5.11, and nothing but the version tells.
pub(crate) fn locked_memory_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    parse_locked_memory(&limits).filter(|_| kernel_version().is_some_and(|version| version < (5, 11)))
}

/// The soft limit: `Max locked memory         65536                65536                bytes`, or `unlimited`.
fn parse_locked_memory(limits: &str) -> Option<u64> {
    let line = limits.lines().find(|line| line.starts_with("Max locked memory"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}

/// What attaches programs to functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FunctionTracer {
    On,
    /// By the sysctl `kernel.ftrace_enabled`.
    Off,
    /// Something went wrong with it, and it doesn't work until the next boot.
    Broken,
    /// The kernel was built without.
    Missing,
    /// `/proc/sys` isn't to be seen.
    Unknown,
}

const ENODEV: i32 = 19;

pub(crate) fn function_tracer() -> FunctionTracer {
    match fs::read_to_string("/proc/sys/kernel/ftrace_enabled") {
        Ok(text) if text.trim_end() == "0" => FunctionTracer::Off,
        Ok(_) => FunctionTracer::On,
        Err(error) if error.raw_os_error() == Some(ENODEV) => FunctionTracer::Broken,
        Err(error) if error.kind() == io::ErrorKind::NotFound && release().is_some() => FunctionTracer::Missing,
        Err(_) => FunctionTracer::Unknown,
    }
}

/// The kernel's version, major and minor. For the rare questions that nothing else answers.
pub(super) fn kernel_version() -> Option<(u32, u32)> {
    parse_version(&release()?)
}

/// The kernel's release, which names the directory of its modules.
pub(super) fn release() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(release.trim_end().to_owned())
}

fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// How far this kernel is locked down, where it says.
pub(crate) fn lockdown() -> Option<Lockdown> {
    parse_lockdown(&fs::read_to_string("/sys/kernel/security/lockdown").ok()?)
}

/// `none [integrity] confidentiality`: the mode in brackets is in force.
fn parse_lockdown(text: &str) -> Option<Lockdown> {
    let (_, rest) = text.split_once('[')?;
    match rest.split_once(']')?.0 {
        "none" => Some(Lockdown::None),
        "integrity" => Some(Lockdown::Integrity),
        "confidentiality" => Some(Lockdown::Confidentiality),
        _ => None,
    }
}

/// The size of the kernel's type information, where it offers any.
pub(crate) fn btf_size() -> Option<u64> {
    let file = fs::File::open(Path::new(BTF_DIR).join("vmlinux")).ok()?;
    file.metadata().ok().map(|metadata| metadata.len()).filter(|&len| len > 0)
}

/// How many modules are loaded, and of how many the kernel offers type information. `None`: it has no modules, or
/// doesn't say.
pub(crate) fn modules_with_btf() -> Option<(usize, usize)> {
    let modules = fs::read_to_string("/proc/modules").ok()?;
    let names = modules.lines().filter_map(|line| line.split_whitespace().next());
    let described = names.filter(|name| Path::new(BTF_DIR).join(name).exists()).count();
    Some((modules.lines().count(), described))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel marks the mode in force with brackets.
    #[test]
    fn lockdown_modes() {
        assert_eq!(parse_lockdown("[none] integrity confidentiality\n"), Some(Lockdown::None));
        assert_eq!(parse_lockdown("none [integrity] confidentiality\n"), Some(Lockdown::Integrity));
        assert_eq!(parse_lockdown("none integrity [confidentiality]\n"), Some(Lockdown::Confidentiality));
        assert_eq!(parse_lockdown("none integrity\n"), None);
        assert_eq!(parse_lockdown("[new]"), None);
    }

    /// Distributions put what they like behind the two numbers.
    #[test]
    fn versions() {
        assert_eq!(parse_version("6.12.118+deb13-cloud-amd64\n"), Some((6, 12)));
        assert_eq!(parse_version("7.3.4"), Some((7, 3)));
        assert_eq!(parse_version("5.10-rc1"), Some((5, 10)));
        assert_eq!(parse_version("six"), None);
    }

    /// The first of the two limits is in force.
    #[test]
    fn locked_memory() {
        let limits =
            "Max processes  10 20 processes\nMax locked memory         65536                unlimited   bytes \n";
        assert_eq!(parse_locked_memory(limits), Some(65_536));
        assert_eq!(parse_locked_memory("Max locked memory    unlimited     unlimited     bytes\n"), None);
        assert_eq!(parse_locked_memory(""), None);
    }

    /// The initial user namespace has one map of everything; without /proc nothing is claimed.
    #[test]
    fn user_namespaces() {
        assert!(!is_partial_map("         0          0 4294967295\n"));
        assert!(is_partial_map("         0       1000          1\n"));
        assert!(is_partial_map("0 1000 1\n1 100000 65536\n"));
        assert!(!is_partial_map(""));
    }

    /// The effective set is one of several in the file.
    #[test]
    fn capability_sets() {
        let status = "CapPrm:\t0000000000000000\nCapEff:\t000000c000000000\nCapBnd:\t000001ffffffffff\n";
        let set = effective(status).unwrap();
        assert_eq!(set >> Capability::Bpf.bit() & 1, 1);
        assert_eq!(set >> Capability::Perfmon.bit() & 1, 1);
        assert_eq!(set >> Capability::SysAdmin.bit() & 1, 0);
        assert_eq!(effective("Name:\tx\n"), None);
    }
}
