//! Why a function can't be attached to: what its name, `/proc/kallsyms` and ftrace's list say of it.
//!
//! These lists are long, and the kernel makes them up as they are read; so they are read only to explain a failure.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::OnceLock;

use super::BTF_DIR;
use crate::error::NotTraceable;

const KALLSYMS: &str = "/proc/kallsyms";

/// Where tracefs is mounted: its own place, or the older one within debugfs.
const FTRACE_LISTS: [&str; 2] =
    ["/sys/kernel/tracing/available_filter_functions", "/sys/kernel/debug/tracing/available_filter_functions"];

/// Functions that never return: from the kernel's `tools/objtool/noreturns.h` those that can be reached at run time, under
/// their names of all versions. Newer kernels refuse fexit on them; older ones accept it and lose a start for each call.
const NEVER_RETURN: [&str; 19] = [
    "__arm64_sys_exit",
    "__arm64_sys_exit_group",
    "__ia32_sys_exit",
    "__ia32_sys_exit_group",
    "__module_put_and_exit",
    "__module_put_and_kthread_exit",
    "__x64_sys_exit",
    "__x64_sys_exit_group",
    "complete_and_exit",
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

/// Parts of the names of functions that take or release a spin lock. The ring buffer and the hash map hold one while
/// they work, so a program that ran at the exit of such a function would wait for itself.
const SPIN_LOCKS: [&str; 4] = ["_spin_lock", "_spin_unlock", "_spin_trylock", "spin_lock_slowpath"];

/// Beginnings of the names of functions that the programs use: the hash map, the ring buffer, clocks, RCU, the
/// trampoline. Before 5.12, where nothing keeps a program from running within itself, to trace one would be a recursion
/// without end; from then on their calls by the programs are skipped, and skipping makes doubt.
const PROBE_PATH: [&str; 31] = [
    "___pcpu_freelist_",
    "__bpf_",
    "__htab_",
    "__pcpu_freelist_",
    "__rcu_",
    "acpi_pm_read",
    "alloc_htab_elem",
    "array_map_",
    "bpf_get_",
    "bpf_ktime_",
    "bpf_map_",
    "bpf_ringbuf_",
    "bpf_trampoline_",
    "copy_map_value",
    "debug_smp_processor_id",
    "free_htab_elem",
    "htab_",
    "hv_clock",
    "irq_work_",
    "ktime_get_",
    "kvm_clock_",
    "lookup_elem_raw",
    "lookup_nulls_elem_raw",
    "migrate_",
    "pcpu_freelist_",
    "pvclock_",
    "rcu_",
    "read_hpet",
    "read_hv_",
    "read_tsc",
    "sched_clock",
];

/// What rules a function out before anything is looked up.
pub(super) fn refused_by_name(function: &str) -> Option<NotTraceable> {
    if NEVER_RETURN.contains(&function) {
        return Some(NotTraceable::NeverReturns);
    }
    let on_path = SPIN_LOCKS.iter().any(|part| function.contains(part))
        || PROBE_PATH.iter().any(|prefix| function.starts_with(prefix));
    on_path.then_some(NotTraceable::ProbePath)
}

/// How many functions of the kernel itself have this name. It attaches to one of them, and doesn't say which.
pub(super) fn copies_in_kernel(function: &str) -> usize {
    static DUPLICATES: OnceLock<HashMap<Box<str>, usize>> = OnceLock::new();
    // The kernel's own symbols don't change, so they are read once for the process. Where they can't be read, nothing
    // is known of copies.
    let duplicates = DUPLICATES
        .get_or_init(|| File::open(KALLSYMS).map(|file| duplicates(BufReader::new(file))).unwrap_or_default());
    duplicates.get(function).copied().unwrap_or(1)
}

fn duplicates(kallsyms: impl BufRead) -> HashMap<Box<str>, usize> {
    let mut counts: HashMap<Box<str>, usize> = HashMap::new();
    for_each_function(kallsyms, |name, module| {
        if module.is_none() {
            *counts.entry(name.into()).or_default() += 1;
        }
    });
    counts.retain(|_, count| *count > 1);
    counts
}

/// How many functions have this name: in this module, and in the kernel and all its modules.
pub(super) fn copies_of_module_function(module: &str, function: &str) -> (usize, usize) {
    Symbols::of(function).map_or((1, 1), |symbols| {
        let here = symbols.modules.iter().filter(|other| other.as_deref() == Some(module)).count();
        (here, symbols.modules.len())
    })
}

/// Why a function that the kernel may well have is in no BTF; `None`: it doesn't have it, or not in that module.
pub(super) fn why_not_in_btf(module: Option<&str>, function: &str) -> Option<NotTraceable> {
    let symbols = Symbols::of(function)?;
    if symbols.modules.is_empty() {
        return symbols.optimised().filter(|_| module.is_none());
    }
    let wanted = |found: &&Option<String>| module.is_none_or(|module| module == found.as_deref().unwrap_or("vmlinux"));
    Some(match symbols.modules.iter().find(wanted)? {
        Some(module) if !Path::new(BTF_DIR).join(module).exists() => {
            NotTraceable::ModuleWithoutBtf { module: module.clone() }
        }
        None if in_ftrace_list(function) == Some(false) => NotTraceable::Excluded,
        _ => NotTraceable::Untyped,
    })
}

/// Why the kernel didn't attach to a function that is in its BTF; `None`: these lists don't tell.
pub(crate) fn why_not_attached(function: &str) -> Option<NotTraceable> {
    // Without kallsyms nothing is known; the kernel's own answer must do.
    let symbols = Symbols::of(function)?;
    if symbols.modules.is_empty() {
        return Some(symbols.optimised().unwrap_or(NotTraceable::Inlined));
    }
    (in_ftrace_list(function) == Some(false)).then_some(NotTraceable::Excluded)
}

/// What `/proc/kallsyms` knows of a name.
#[derive(Debug, Default, PartialEq, Eq)]
struct Symbols {
    /// The modules of the functions of exactly this name; `None`: the kernel itself.
    modules: Vec<Option<String>>,
    /// Names such as `function.isra.0`.
    variants: Vec<String>,
}

impl Symbols {
    /// `None` if the symbols can't be read.
    fn of(function: &str) -> Option<Self> {
        Self::read(BufReader::new(File::open(KALLSYMS).ok()?), function)
    }

    fn read(kallsyms: impl BufRead, function: &str) -> Option<Self> {
        let mut symbols = Self::default();
        let mut any = false;
        for_each_function(kallsyms, |name, module| {
            any = true;
            let Some(suffix) = name.strip_prefix(function) else { return };
            if suffix.is_empty() {
                symbols.modules.push(module.map(str::to_owned));
            } else if suffix.starts_with('.') {
                symbols.variants.push(name.to_owned());
            }
        });
        // A file that lists no function at all has been masked, as in a container.
        any.then_some(symbols)
    }

    fn optimised(self) -> Option<NotTraceable> {
        (!self.variants.is_empty()).then_some(NotTraceable::OptimisedVariant { symbols: self.variants })
    }
}

/// Calls `each` with the name and the module of every function. Lines are `ADDRESS TYPE NAME`, in modules followed by a
/// tab and `[MODULE]`.
fn for_each_function(kallsyms: impl BufRead, mut each: impl FnMut(&str, Option<&str>)) {
    for line in kallsyms.split(b'\n').map_while(Result::ok) {
        let Ok(line) = std::str::from_utf8(&line) else { continue };
        let mut words = line.split_ascii_whitespace().skip(1);
        if let (Some("t" | "T" | "w" | "W"), Some(name)) = (words.next(), words.next()) {
            each(name, words.next().map(|module| module.trim_matches(['[', ']'])));
        }
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
0000000000000000 t state_show
0000000000000000 t state_show
0000000000000000 t nf_hook_entry_head\t[nf_tables]
0000000000000000 t state_show\t[bonding]
";

    fn symbols(function: &str) -> Symbols {
        Symbols::read(KALLSYMS.as_bytes(), function).unwrap()
    }

    /// A name's code, its module, its copies and its optimised variants are told apart.
    #[test]
    fn reads_kallsyms() {
        assert_eq!(symbols("ip_rcv"), Symbols { modules: vec![None], ..Symbols::default() });
        let variants = vec!["ip_rcv_finish.isra.0".to_owned(), "ip_rcv_finish.cold".to_owned()];
        assert_eq!(symbols("ip_rcv_finish"), Symbols { variants, ..Symbols::default() });
        let modules = vec![Some("nf_tables".to_owned())];
        assert_eq!(symbols("nf_hook_entry_head"), Symbols { modules, ..Symbols::default() });
        assert_eq!(symbols("state_show").modules, [None, None, Some("bonding".to_owned())]);
        assert_eq!(symbols("ip_rcv_data"), Symbols::default());
        assert_eq!(symbols("no_such"), Symbols::default());
        assert_eq!(Symbols::read("".as_bytes(), "ip_rcv"), None, "a masked file knows nothing");
    }

    /// Copies within the kernel are counted; one in a module isn't one of them.
    #[test]
    fn finds_duplicates() {
        let duplicates = duplicates(KALLSYMS.as_bytes());
        assert_eq!(duplicates.len(), 1);
        assert_eq!(duplicates["state_show"], 2);
    }

    /// What can't be traced whatever the kernel says, and what only looks like it.
    #[test]
    fn refuses_by_name() {
        for name in ["do_exit", "make_task_dead", "kthread_exit", "complete_and_exit"] {
            assert_eq!(refused_by_name(name), Some(NotTraceable::NeverReturns), "{name}");
        }
        let locks = ["_raw_spin_lock", "native_queued_spin_lock_slowpath", "_raw_spin_unlock_irqrestore"];
        // Each of the first four has brought a 5.10 kernel down.
        let path = ["___pcpu_freelist_pop", "free_htab_elem", "lookup_elem_raw", "bpf_ringbuf_reserve"];
        let more = ["array_map_lookup_elem", "ktime_get_mono_fast_ns", "migrate_disable", "bpf_ktime_get_ns"];
        for name in locks.iter().chain(&path).chain(&more) {
            assert_eq!(refused_by_name(name), Some(NotTraceable::ProbePath), "{name}");
        }
        let harmless =
            ["ip_rcv", "exit_mmap", "bpf_fentry_test1", "____sys_recvmsg", "___pskb_trim", "bpf_skb_load_bytes"];
        for name in harmless.iter().chain(&["bpf_prog_run_generic_xdp", "netif_receive_skb"]) {
            assert_eq!(refused_by_name(name), None, "{name}");
        }
    }
}
