//! What the kernel was doing as a span ended: [`Story`].

use std::fmt;

use crate::kernel::{PROGRAMS, Symbol, Symbolizer};
use crate::wire::{RawStory, context};

/// What the kernel was doing as a span ended, see [`stories`](crate::LatencyProbeBuilder::stories).
///
/// ```
/// use dwell::{CpuContext, LatencyEvent};
///
/// /// Where it was that something held a packet up, and how.
/// fn explain(event: &LatencyEvent) -> String {
///     let Some(story) = &event.story else { return "nobody asked".into() };
///     let function = story.stack.frames().iter().find_map(|frame| frame.symbol);
///     match (story.context, story.switches) {
///         (Some(CpuContext::Task), Some(switches)) if switches > 0 => format!("{} slept {switches} times", event.comm),
///         _ => format!("in {}", function.map_or("?".into(), |symbol| symbol.to_string())),
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Story {
    /// For whom the CPU was working. `None` where that can't be told: where this process may not see the kernel's
    /// addresses (that takes `CAP_SYSLOG`, unless `kernel.kptr_restrict` is 0), on kernels without
    /// `CONFIG_KALLSYMS_ALL`, under the lockdown mode `confidentiality`, and on other architectures than x86-64 and those
    /// that count it in their tasks, as arm64.
    pub context: Option<CpuContext>,
    /// How often the thread gave up its CPU, or lost it, between start and end: 0 says that it was running all the time,
    /// but for interrupts. Of calls, and of spans by thread; `None` for others, whose ends may be met by other threads,
    /// and under the lockdown mode `confidentiality`.
    ///
    /// A call in a softirq belongs to the thread that was interrupted, which can't be switched out meanwhile (but with
    /// `PREEMPT_RT`).
    pub switches: Option<u64>,
    /// The kernel's stack at the end.
    pub stack: KernelStack,
}

impl Story {
    /// `function` is the address of the one at which it ended, if it was one.
    pub(crate) fn new(raw: &RawStory, symbols: Option<&Symbolizer>, function: Option<u64>) -> Self {
        let context = match raw.context {
            context::TASK => Some(CpuContext::Task),
            context::SOFTIRQ => Some(CpuContext::Softirq),
            context::HARDIRQ => Some(CpuContext::Hardirq),
            context::NMI => Some(CpuContext::Nmi),
            context::IDLE => Some(CpuContext::Idle),
            _ => None,
        };
        let switches = (raw.switches != RawStory::UNKNOWN_SWITCHES).then_some(raw.switches);
        Self { context, switches, stack: KernelStack::new(raw, symbols, function) }
    }
}

/// In one line, without the stack: `softirq`, `task, switched out 2 times`.
impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.context.map_or("unknown context", |context| context.as_str()))?;
        match self.switches {
            None | Some(0) => Ok(()),
            Some(1) => f.write_str(", switched out once"),
            Some(switches) => write!(f, ", switched out {switches} times"),
        }
    }
}

/// For whom a CPU works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CpuContext {
    /// The thread that the event names, in a system call mostly, or one that polls a network device (threaded NAPI).
    Task,
    /// A softirq, such as that of the network; the thread that the event names was interrupted by it, or is `ksoftirqd`.
    Softirq,
    /// A hardware interrupt.
    Hardirq,
    /// An interrupt that can't be masked.
    Nmi,
    /// The idle task.
    Idle,
}

impl CpuContext {
    /// `task`, `softirq`, `hardirq`, `nmi` or `idle`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Softirq => "softirq",
            Self::Hardirq => "hardirq",
            Self::Nmi => "nmi",
            Self::Idle => "idle",
        }
    }
}

impl fmt::Display for CpuContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Where in its code the kernel was, from the innermost function to the outermost.
///
/// It begins with the function at which the span ended, or that had the tracepoint; the probe's own programs, and what
/// the kernel calls them by, are left out. Without symbols there is no telling them apart, and all is there. A
/// [`LatencyEvent`](crate::LatencyEvent) shares it with its clones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KernelStack {
    frames: Vec<Frame>,
    is_cut: bool,
}

/// One function that had been called and hadn't returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Frame {
    /// Where it goes on once what it has called returns; its beginning, where that can't be told of the innermost.
    pub address: u64,
    /// What is there. `None` for code without a name, and where this process may not see the kernel's addresses.
    pub symbol: Option<Symbol>,
}

/// Frames at the beginning among which the probe's own may be.
const OWN_FRAMES: usize = 8;

impl KernelStack {
    fn new(raw: &RawStory, symbols: Option<&Symbolizer>, function: Option<u64>) -> Self {
        let addresses = raw.addresses();
        let frame =
            |&address: &u64| Frame { address, symbol: symbols.and_then(|symbols| symbols.resolve_return(address)) };
        let mut frames: Vec<_> = addresses.iter().map(frame).collect();
        // If there are no symbols at all, there is no telling which these are.
        let own = frames.iter().take(OWN_FRAMES).position(|frame| !frame.is_own());
        frames.drain(..own.unwrap_or(0));
        // On newer kernels (7.3) a function may jump to the probe's programs instead of calling them, and isn't on the stack.
        let begins = |frame: &Frame| frame.symbol.map(|symbol| frame.address.wrapping_sub(symbol.offset));
        let is_missing = own.is_some() && frames.first().is_some_and(|first| begins(first) != function);
        if let Some(address) = function.filter(|_| is_missing) {
            let symbol = symbols.and_then(|symbols| symbols.resolve(address));
            frames.insert(0, Frame { address, symbol });
        }
        Self { frames, is_cut: addresses.len() == raw.stack.len() }
    }

    /// The innermost first. Empty if the kernel couldn't tell.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Whether there may be more, further out: of a stack the innermost 64 frames are kept, some of which are the probe's.
    /// Where `kernel.perf_event_max_stack` is less than that (it is 127 by default), so many are kept, and this says `false`.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }
}

/// A line for each frame.
impl fmt::Display for KernelStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, frame) in self.frames.iter().enumerate() {
            if n > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{frame}")?;
        }
        if self.is_cut { f.write_str("\n...") } else { Ok(()) }
    }
}

impl Frame {
    /// Whether it is a program, or what calls one at a function or a tracepoint. The kernel may not name the former.
    fn is_own(&self) -> bool {
        const CALLERS: [&str; 4] = ["bpf_trace_run", "__bpf_trace_", "__traceiter_", "bpf_trampoline_"];
        let Some(Symbol { name, module, .. }) = self.symbol else { return true };
        module.is_some_and(|module| module == PROGRAMS) || CALLERS.iter().any(|prefix| name.starts_with(prefix))
    }
}

/// As in the kernel's own messages: `ip_rcv+0x8a`, `nft_do_chain+0x1f [nf_tables]`, or an address.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.symbol {
            Some(symbol) => symbol.fmt(f),
            None => write!(f, "{:#x}", self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &str = "\
ffffffff81000000 T ip_rcv
ffffffff81001000 T __netif_receive_skb
ffffffff81002000 T bpf_trace_run3
ffffffff81003000 T kfree_skb_reason
ffffffff81004000 T _etext
ffffffffc0001000 t nft_do_chain\t[nf_tables]
ffffffffc0002000 t bpf_prog_0123_call_exit\t[bpf]
ffffffffc0003000 t bpf_trampoline_42\t[bpf]
";

    fn story(addresses: &[u64]) -> RawStory {
        let mut raw = RawStory { bytes: 8 * addresses.len() as i32, ..RawStory::default() };
        raw.stack[..addresses.len()].copy_from_slice(addresses);
        raw
    }

    fn stack(addresses: &[u64], kallsyms: &'static str) -> KernelStack {
        KernelStack::new(&story(addresses), Some(&Symbolizer::canned(kallsyms)), None)
    }

    /// What is the probe's own is left out, also where it has no name; what another program's is, in the middle, isn't.
    #[test]
    fn begins_where_the_span_ends() {
        let inner = [0xffff_ffff_c000_2010, 0xffff_ffff_c000_3010];
        let outer = [0xffff_ffff_8100_0005, 0xffff_ffff_c000_2010, 0xffff_ffff_c000_1010, 0xffff_ffff_8100_2000];
        let expected = "ip_rcv+0x5\nbpf_prog_0123_call_exit+0x10 [bpf]\nnft_do_chain+0x10 [nf_tables]\n\
                        __netif_receive_skb+0x1000";
        assert_eq!(
            stack(&[inner, [outer[0], outer[1]], [outer[2], outer[3]]].concat(), KALLSYMS).to_string(),
            expected
        );
        let nameless = [0xffff_ffff_c100_0000, 0xffff_ffff_c100_1000];
        assert_eq!(stack(&[&nameless[..], &outer[..]].concat(), KALLSYMS).to_string(), expected);
        let tracepoint = [0xffff_ffff_c000_2010, 0xffff_ffff_8100_2010, 0xffff_ffff_8100_3010];
        assert_eq!(stack(&tracepoint, KALLSYMS).to_string(), "kfree_skb_reason+0x10");
    }

    /// A function that jumped to the probe's programs comes first all the same, and one that called them only once.
    #[test]
    fn jumps() {
        let (own, ip_rcv, caller) = (0xffff_ffff_c000_2010, 0xffff_ffff_8100_0000, 0xffff_ffff_8100_1010);
        for addresses in [&[own, ip_rcv + 5, caller][..], &[own, caller]] {
            let stack = KernelStack::new(&story(addresses), Some(&Symbolizer::canned(KALLSYMS)), Some(ip_rcv));
            let functions: Vec<_> = stack.frames().iter().map(|frame| frame.symbol.unwrap().name).collect();
            assert_eq!(functions, ["ip_rcv", "__netif_receive_skb"]);
        }
    }

    /// Without names there are still addresses, all of them.
    #[test]
    fn without_symbols() {
        let stack = stack(&[0x1234, 0xffff_ffff_8100_0005], "");
        assert_eq!(stack.to_string(), "0x1234\n0xffffffff81000005");
        assert!(!stack.is_cut() && stack.frames().len() == 2);
    }

    /// Of a stack that doesn't fit it is said that there is more; an error, or what is no length, is no stack.
    #[test]
    fn lengths() {
        let deep = stack(&[0xffff_ffff_8100_0005; 64], KALLSYMS);
        assert!(deep.is_cut() && deep.frames().len() == 64 && deep.to_string().ends_with("\n..."));
        for bytes in [-14, 0, 7, i32::MIN, i32::MAX, 520] {
            let raw = RawStory { bytes, ..story(&[1, 2]) };
            assert_eq!(KernelStack::new(&raw, None, None).frames(), [], "{bytes}");
        }
    }

    /// What is unknown is `None`, whatever number stands for it.
    #[test]
    fn contexts() {
        let told = |context, switches| {
            let raw = RawStory { context, switches, ..story(&[]) };
            Story::new(&raw, None, None)
        };
        assert_eq!(told(2, 0).to_string(), "softirq");
        assert_eq!(told(1, 1).to_string(), "task, switched out once");
        assert_eq!(told(1, 2).to_string(), "task, switched out 2 times");
        assert_eq!(told(1, u64::MAX).switches, None);
        let contexts: Vec<_> = (0..8).map(|context| told(context, 0).context).collect();
        use CpuContext::{Hardirq, Idle, Nmi, Softirq, Task};
        assert_eq!(contexts, [None, Some(Task), Some(Softirq), Some(Hardirq), Some(Nmi), Some(Idle), None, None]);
    }
}
