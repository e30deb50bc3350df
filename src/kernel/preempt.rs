//! Where the kernel counts for whom its CPUs work: `preempt_count`, see `include/linux/preempt.h`.

use super::Symbolizer;
use super::lookup::Kernel;

/// Where it is, if not in each task, and what of it says what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreemptCount {
    /// From a CPU's own memory. 0: it is a member of tasks.
    pub(crate) offset: u64,
    /// The address of the table of where each CPU has its own memory.
    pub(crate) per_cpu_offsets: u64,
    /// The bits that count hard interrupts, and NMIs.
    pub(crate) hardirqs: u32,
    pub(crate) nmis: u32,
}

const PER_CPU_OFFSETS: &str = "__per_cpu_offset";
/// A variable of its own before Linux 6.2 and from 6.15 on,
const ALONE: &str = "__preempt_count";
/// and in between a member of this one.
const HOT: &str = "pcpu_hot";
/// A kernel with this (Linux 7.3 is one) also counts in it how often interrupts were disabled, in the bits where hard interrupts
/// were counted before. Nothing else tells.
const WITH_INTERRUPTS: &str = "local_interrupt_disable_state";

/// What [`PreemptCount::find`] asks for.
pub(super) const VARIABLES: [&str; 4] = [PER_CPU_OFFSETS, ALONE, HOT, WITH_INTERRUPTS];

impl PreemptCount {
    /// `None`: the kernel doesn't show its variables, or this is an architecture where neither they nor tasks have it.
    pub(crate) fn find(kernel: &Kernel, symbols: &Symbolizer) -> Option<Self> {
        // Variables are shown all or none, and without them nothing tells which bits.
        let per_cpu_offsets = symbols.variable(PER_CPU_OFFSETS)?;
        let bits = Self::bits(symbols.variable(WITH_INTERRUPTS).is_some());
        if kernel.member_offset("thread_info", "preempt_count").is_some() {
            return Some(bits);
        }
        cfg!(target_arch = "x86_64").then_some(())?;
        let in_hot = || Some(symbols.variable(HOT)? + u64::from(kernel.member_offset(HOT, "preempt_count")?));
        Some(Self { offset: symbols.variable(ALONE).or_else(in_hot)?, per_cpu_offsets, ..bits })
    }

    fn bits(with_interrupts: bool) -> Self {
        let (hardirqs, nmis) = if with_interrupts { (0x0f00_0000, 0xf000_0000) } else { (0x000f_0000, 0x00f0_0000) };
        Self { offset: 0, per_cpu_offsets: 0, hardirqs, nmis }
    }
}
