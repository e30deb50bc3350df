//! What can't be traced whatever the kernel says.

use crate::error::NotTraceable;

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
/// trampoline, reading memory, walking the stack. Before 5.12, where nothing keeps a program from running within itself, to trace one would be a recursion
/// without end; from then on their calls by the programs are skipped, and skipping makes doubt.
const PROBE_PATH: [&str; 42] = [
    "___pcpu_freelist_",
    "__bpf_",
    "__htab_",
    "__kernel_text_address",
    "__pcpu_freelist_",
    "__rcu_",
    "__unwind_",
    "acpi_pm_read",
    "alloc_htab_elem",
    "array_map_",
    "bpf_get_",
    "bpf_ktime_",
    "bpf_map_",
    "bpf_ringbuf_",
    "bpf_trampoline_",
    "copy_from_kernel_nofault",
    "copy_map_value",
    "debug_smp_processor_id",
    "free_htab_elem",
    "get_callchain_",
    "get_perf_callchain",
    "get_recursion_context",
    "htab_",
    "hv_clock",
    "irq_work_",
    "is_bpf_text_address",
    "ktime_get_",
    "kvm_clock_",
    "lookup_elem_raw",
    "lookup_nulls_elem_raw",
    "migrate_",
    "orc_",
    "pcpu_freelist_",
    "perf_callchain_",
    "put_callchain_",
    "pvclock_",
    "rcu_",
    "read_hpet",
    "read_hv_",
    "read_tsc",
    "sched_clock",
    "unwind_",
];

/// What rules a function out before anything is looked up.
pub(super) fn by_name(function: &str) -> Option<NotTraceable> {
    if NEVER_RETURN.contains(&function) {
        return Some(NotTraceable::NeverReturns);
    }
    let on_path = SPIN_LOCKS.iter().any(|part| function.contains(part))
        || PROBE_PATH.iter().any(|prefix| function.starts_with(prefix));
    on_path.then_some(NotTraceable::ProbePath)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What can't be traced whatever the kernel says, and what only looks like it.
    #[test]
    fn refuses_by_name() {
        for name in ["do_exit", "make_task_dead", "kthread_exit", "complete_and_exit"] {
            assert_eq!(by_name(name), Some(NotTraceable::NeverReturns), "{name}");
        }
        let locks = ["_raw_spin_lock", "queued_spin_lock_slowpath", "native_queued_spin_lock_slowpath"];
        // Each of the first four has brought a 5.10 kernel down.
        let path = ["___pcpu_freelist_pop", "free_htab_elem", "lookup_elem_raw", "bpf_ringbuf_reserve"];
        let more = ["array_map_lookup_elem", "ktime_get_mono_fast_ns", "migrate_disable", "bpf_ktime_get_ns"];
        let rcu = ["rcu_note_context_switch", "__rcu_read_lock", "migrate_enable", "_raw_spin_unlock_irqrestore"];
        let stacks = ["get_perf_callchain", "unwind_next_frame", "copy_from_kernel_nofault"];
        for name in locks.iter().chain(&path).chain(&more).chain(&rcu).chain(&stacks) {
            assert_eq!(by_name(name), Some(NotTraceable::ProbePath), "{name}");
        }
        let harmless =
            ["ip_rcv", "exit_mmap", "bpf_fentry_test1", "____sys_recvmsg", "___pskb_trim", "bpf_skb_load_bytes"];
        for name in harmless.iter().chain(&["bpf_prog_run_generic_xdp", "netif_receive_skb"]) {
            assert_eq!(by_name(name), None, "{name}");
        }
    }
}
