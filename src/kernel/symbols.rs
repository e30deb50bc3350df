//! Why a function can't be attached to: what its name, `/proc/kallsyms` and ftrace's list say of it.
//!
//! These lists are long, and the kernel makes them up as they are read; so they are read only to explain a failure.

use std::fs::File;
use std::io::{BufRead, BufReader};

use crate::error::NotTraceable;

/// Where tracefs is mounted: its own place, or the older one within debugfs.
const FTRACE_LISTS: [&str; 2] =
    ["/sys/kernel/tracing/available_filter_functions", "/sys/kernel/debug/tracing/available_filter_functions"];

/// Functions that never return: from the kernel's `tools/objtool/noreturns.h` those that can be reached at run time.
/// Newer kernels refuse fexit on them; older ones accept it and lose a start for each call.
const NEVER_RETURN: [&str; 15] = [
    "__module_put_and_kthread_exit",
    "__x64_sys_exit",
    "__x64_sys_exit_group",
    "__arm64_sys_exit",
    "__arm64_sys_exit_group",
    "cpu_startup_entry",
    "do_exit",
    "do_group_exit",
    "do_task_dead",
    "kthread_complete_and_exit",
    "kthread_exit",
    "make_task_dead",
    "panic",
    "rewind_stack_and_make_dead",
    "vhost_task_fn",
];

/// Beginnings of names of functions that the probe's programs run through, in the maps, the ring buffer and the
/// trampoline. Kernels before 5.12 have no guard against the endless recursion that tracing them would be.
const PROBE_PATH_PREFIXES: [&str; 10] = [
    "__bpf_",
    "__htab_",
    "__pcpu_freelist_",
    "__rcu_",
    "bpf_",
    "htab_",
    "migrate_",
    "pcpu_freelist_",
    "rcu_",
    "irq_work_",
];
const PROBE_PATH_PARTS: [&str; 3] = ["_spin_lock", "_spin_unlock", "_spin_trylock"];

/// What rules a function out before anything is looked up.
pub(super) fn refused_by_name(function: &str) -> Option<NotTraceable> {
    if NEVER_RETURN.contains(&function) {
        return Some(NotTraceable::NeverReturns);
    }
    let on_path = PROBE_PATH_PREFIXES.iter().any(|prefix| function.starts_with(prefix))
        || PROBE_PATH_PARTS.iter().any(|part| function.contains(part))
        || function == "queued_spin_lock_slowpath";
    // The kernel's own test functions do nothing but be traced.
    (on_path && !function.starts_with("bpf_fentry_test")).then_some(NotTraceable::ProbePath)
}

/// Why a function that the kernel may well have is in no BTF; `None`: it doesn't have it, or not in that module.
pub(super) fn why_not_in_btf(module: Option<&str>, function: &str) -> Option<NotTraceable> {
    let symbols = Symbols::of(function)?;
    if module.is_some_and(|module| module != symbols.module.as_deref().unwrap_or("vmlinux")) {
        return None;
    }
    if !symbols.plain {
        return symbols.optimised();
    }
    Some(match symbols.module {
        Some(module) => NotTraceable::ModuleWithoutBtf { module },
        None if in_ftrace_list(function) == Some(false) => NotTraceable::Excluded,
        None => NotTraceable::Untyped,
    })
}

/// Why the kernel didn't attach to a function that is in its BTF; `None`: these lists don't tell.
pub(crate) fn why_not_attached(function: &str) -> Option<NotTraceable> {
    // Without kallsyms nothing is known; the kernel's own answer must do.
    let symbols = Symbols::of(function)?;
    if !symbols.plain {
        return Some(symbols.optimised().unwrap_or(NotTraceable::Inlined));
    }
    (in_ftrace_list(function) == Some(false)).then_some(NotTraceable::Excluded)
}

/// What `/proc/kallsyms` knows of a name.
#[derive(Debug, Default, PartialEq, Eq)]
struct Symbols {
    /// There is code of exactly this name.
    plain: bool,
    /// The module of that code.
    module: Option<String>,
    /// Names such as `function.isra.0`.
    variants: Vec<String>,
}

impl Symbols {
    fn of(function: &str) -> Option<Self> {
        Some(Self::read(BufReader::new(File::open("/proc/kallsyms").ok()?), function))
    }

    /// Lines are `ADDRESS TYPE NAME`, in modules followed by a tab and `[MODULE]`.
    fn read(kallsyms: impl BufRead, function: &str) -> Self {
        let mut symbols = Self::default();
        for line in kallsyms.split(b'\n').map_while(Result::ok) {
            let Ok(line) = std::str::from_utf8(&line) else { continue };
            let mut words = line.split_ascii_whitespace();
            let (_, Some(kind), Some(name)) = (words.next(), words.next(), words.next()) else { continue };
            let Some(suffix) = name.strip_prefix(function) else { continue };
            if !matches!(kind, "t" | "T" | "w" | "W") {
                continue;
            }
            if suffix.is_empty() {
                symbols.plain = true;
                let module = words.next().map(|module| module.trim_matches(['[', ']']).to_owned());
                symbols.module = symbols.module.take().or(module);
            } else if suffix.starts_with('.') {
                symbols.variants.push(name.to_owned());
            }
        }
        symbols
    }

    fn optimised(self) -> Option<NotTraceable> {
        (!self.variants.is_empty()).then_some(NotTraceable::OptimisedVariant { symbols: self.variants })
    }
}

/// Whether ftrace lists the function; `None` where its list can't be read (not mounted, not root, locked down).
fn in_ftrace_list(function: &str) -> Option<bool> {
    let list = FTRACE_LISTS.iter().find_map(|path| File::open(path).ok())?;
    let mut lines = BufReader::new(list).lines().map_while(Result::ok).peekable();
    lines.peek()?;
    Some(lines.any(|line| line.split_ascii_whitespace().next() == Some(function)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &str = "\
0000000000000000 T ip_rcv
0000000000000000 t ip_rcv_core
0000000000000000 t ip_rcv_finish.isra.0
0000000000000000 t ip_rcv_finish.cold
0000000000000000 d ip_rcv_data
0000000000000000 t nf_hook_entry_head\t[nf_tables]
";

    fn symbols(function: &str) -> Symbols {
        Symbols::read(KALLSYMS.as_bytes(), function)
    }

    /// A name's code, its module and its optimised copies are told apart.
    #[test]
    fn reads_kallsyms() {
        assert_eq!(symbols("ip_rcv"), Symbols { plain: true, ..Symbols::default() });
        let variants = vec!["ip_rcv_finish.isra.0".to_owned(), "ip_rcv_finish.cold".to_owned()];
        assert_eq!(symbols("ip_rcv_finish"), Symbols { variants, ..Symbols::default() });
        let module = Some("nf_tables".to_owned());
        assert_eq!(symbols("nf_hook_entry_head"), Symbols { plain: true, module, ..Symbols::default() });
        assert_eq!(symbols("ip_rcv_data"), Symbols::default());
        assert_eq!(symbols("no_such"), Symbols::default());
    }

    /// What can't be traced whatever the kernel says, and what only looks like it.
    #[test]
    fn refuses_by_name() {
        for name in ["do_exit", "make_task_dead", "kthread_exit"] {
            assert_eq!(refused_by_name(name), Some(NotTraceable::NeverReturns), "{name}");
        }
        for name in ["bpf_ringbuf_reserve", "htab_map_update_elem", "_raw_spin_lock", "migrate_disable"] {
            assert_eq!(refused_by_name(name), Some(NotTraceable::ProbePath), "{name}");
        }
        for name in ["ip_rcv", "exit_mmap", "bpf_fentry_test1", "____sys_recvmsg", "___pskb_trim"] {
            assert_eq!(refused_by_name(name), None, "{name}");
        }
    }
}
