//! What a user asks for: [`LatencyProbeBuilder`].

use std::ops::RangeInclusive;

use crossbeam_channel::bounded;

use crate::decode::SpanKind;
use crate::driver::{self, Reader, Shared, Target};
use crate::error::Error;
use crate::event::SpanName;
use crate::kernel::{self, Kernel};
use crate::pairing::Pairing;
use crate::probe::{LatencyProbe, SpanInfo};

/// Describes a probe; [`attach`](Self::attach) starts it.
///
/// Each setter takes and returns the builder by value. Nothing is checked, and nothing asked of the kernel, before
/// `attach`.
///
/// ```no_run
/// use dwell::LatencyProbe;
///
/// let probe = LatencyProbe::builder()
///     .function("ip_rcv")
///     .function("nf_conntrack:nf_conntrack_in")
///     .channel_capacity(100_000)
///     .attach()?;
/// # drop(probe);
/// # Ok::<(), dwell::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until `attach` is called"]
pub struct LatencyProbeBuilder {
    functions: Vec<String>,
    in_flight: usize,
    ring_bytes: usize,
    channel_capacity: usize,
}

const IN_FLIGHT: RangeInclusive<usize> = 1..=1 << 20;
const CHANNEL_CAPACITY: RangeInclusive<usize> = 1..=1 << 24;
/// The longest symbol that any kernel has (`KSYM_NAME_LEN`), twice, for `MODULE:FUNCTION`.
const LONGEST_NAME: usize = 1024;

impl LatencyProbeBuilder {
    pub(crate) fn new() -> Self {
        Self { functions: Vec::new(), in_flight: 8_192, ring_bytes: 4 << 20, channel_capacity: 16_384 }
    }

    /// Measures each call of a kernel function, from entry to exit. Can be repeated.
    ///
    /// `name` is a function of the kernel, such as `ip_rcv`, or else of a loaded module. `MODULE:FUNCTION` says which
    /// module, where several have the name or the kernel has it as well. The span gets this name.
    ///
    /// # Errors
    ///
    /// `attach` fails if the name is empty, not a name, given twice, unknown, or of a function that can't be traced.
    pub fn function(mut self, name: impl Into<String>) -> Self {
        self.functions.push(name.into());
        self
    }

    /// Room for this many calls in flight, for each span: entered and not yet returned from. Defaults to 8,192.
    ///
    /// That is plenty for functions that run to their end on a CPU. For those that sleep (`inet_csk_accept`,
    /// `tcp_recvmsg`), it should be the number of threads that may sleep in them at once. A call that finds no room is
    /// counted as [`untracked`](crate::SpanLedger::untracked). A span takes 136 KiB of kernel memory, and about 100
    /// bytes for each call beyond 4,096.
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 1,048,576.
    pub fn in_flight(mut self, calls: usize) -> Self {
        self.in_flight = calls;
        self
    }

    /// The size of the ring buffer between the kernel and the reader thread, one for the probe. Defaults to 4 MiB.
    ///
    /// Rounded up to a power of two and to the page size. An event takes 88 bytes; while the ring is full, events are
    /// dropped and counted as [`ring_dropped`](crate::SpanLedger::ring_dropped).
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 byte to 1 GiB, or if there is no memory for it.
    pub fn ring_bytes(mut self, bytes: usize) -> Self {
        self.ring_bytes = bytes;
        self
    }

    /// How many events the channel holds. Defaults to 16,384.
    ///
    /// Its memory (about 100 bytes for each) is allocated by `attach`. While it is full, events are dropped and counted
    /// as [`channel_dropped`](crate::SpanLedger::channel_dropped).
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 16,777,216.
    pub fn channel_capacity(mut self, events: usize) -> Self {
        self.channel_capacity = events;
        self
    }

    /// Attaches to the kernel, and returns once every hook is live: from then on each call counts.
    ///
    /// On failure nothing is left attached. Either comes quickly, within some tens of milliseconds for each function.
    /// Nothing is printed; for what libbpf has to say see [`set_libbpf_log`](crate::set_libbpf_log).
    ///
    /// # Errors
    ///
    /// Any [`ErrorKind`](crate::ErrorKind): the settings are checked first, then the privileges, then every function
    /// is looked up, and only then is anything loaded.
    pub fn attach(self) -> Result<LatencyProbe, Error> {
        self.validate()?;
        let Self { functions, in_flight, ring_bytes, channel_capacity } = self;
        let ring_bytes = driver::ring_size(ring_bytes).ok_or_else(|| {
            Error::config("ring_bytes", format!("a ring buffer of {ring_bytes} bytes: 1 byte to 1 GiB is possible"))
        })?;
        kernel::check_privileges()?;
        let names: Vec<_> = functions.iter().map(String::as_str).collect();
        let kernel = Kernel::open()?;
        let targets: Vec<Target> =
            names.iter().map(|name| kernel.function(name).map(Target::from)).collect::<Result<_, _>>()?;
        check_distinct(&names, &targets)?;

        let store = driver::choose_store()?;
        let shared = Shared::create(ring_bytes, store)?;
        let (sender, events) = bounded(channel_capacity);
        let spans: Vec<_> =
            names.iter().zip(&targets).map(|(&name, target)| SpanKind { name: name.into(), ret: target.ret }).collect();
        let names: Vec<SpanName> = spans.iter().map(|span| span.name.clone()).collect();
        // Reading before anything writes, so that attaching many functions on a busy machine loses no event.
        let reader = Reader::spawn(&shared, spans, sender)?;
        let mut attached = Vec::with_capacity(targets.len());
        let mut infos = Vec::with_capacity(targets.len());
        for (index, (name, target)) in names.into_iter().zip(targets).enumerate() {
            let span = driver::attach(&shared, index as u32, &name, &target, in_flight as u32)?;
            let Target { function, module, .. } = target;
            infos.push(SpanInfo { name, function, module, pairing: Pairing::Frame, store });
            attached.push(span);
        }
        shared.switch_on()?;
        Ok(LatencyProbe::new(infos, attached, reader, events))
    }

    /// Checks what can be checked without a kernel.
    fn validate(&self) -> Result<(), Error> {
        if self.functions.is_empty() {
            return Err(Error::config("function", "nothing to measure: name at least one function with `function()`"));
        }
        for (n, name) in self.functions.iter().enumerate() {
            if !is_name(name) {
                let reason = format!("{name:?} is not a function's name: FUNCTION or MODULE:FUNCTION is");
                return Err(Error::config("function", reason));
            }
            if self.functions[..n].contains(name) {
                return Err(Error::config("function", format!("`{name}` is named twice: one span for each function")));
            }
        }
        in_range("in_flight", "calls in flight", self.in_flight, &IN_FLIGHT)?;
        in_range("channel_capacity", "events in the channel", self.channel_capacity, &CHANNEL_CAPACITY)
    }
}

fn is_name(name: &str) -> bool {
    let symbol = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$-".contains(&byte))
    };
    let (module, function) = name.split_once(':').unwrap_or(("vmlinux", name));
    name.len() <= LONGEST_NAME && symbol(module) && symbol(function)
}

fn in_range(setting: &'static str, what: &str, value: usize, range: &RangeInclusive<usize>) -> Result<(), Error> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::config(setting, format!("{value} {what}: {} to {} are possible", range.start(), range.end())))
}

/// The same function under two names (`ip_rcv`, `vmlinux:ip_rcv`) is one function.
fn check_distinct(names: &[&str], targets: &[Target]) -> Result<(), Error> {
    for (n, target) in targets.iter().enumerate() {
        let same = |other: &Target| other.function == target.function && other.module == target.module;
        if let Some(first) = targets[..n].iter().position(same) {
            let reason = format!("`{}` and `{}` are the same function: one span for each", names[first], names[n]);
            return Err(Error::config("function", reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn rejected(builder: LatencyProbeBuilder) -> (&'static str, String) {
        match builder.attach().expect_err("it must be refused").kind() {
            ErrorKind::Config { setting, reason } => (setting, reason.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn builder() -> LatencyProbeBuilder {
        LatencyProbeBuilder::new().function("ip_rcv")
    }

    /// A probe without spans is refused.
    #[test]
    fn something_to_measure() {
        let (setting, reason) = rejected(LatencyProbeBuilder::new());
        assert_eq!(setting, "function");
        assert_eq!(reason, "nothing to measure: name at least one function with `function()`");
    }

    /// What can't be a name is refused as such, not looked up.
    #[test]
    fn names() {
        let long = "x".repeat(LONGEST_NAME + 1);
        for name in ["", " ", "ip rcv", "ip_rcv\0", "ip_rcv\n", "a:", ":a", "a:b:c", "*", "ïp_rcv", &long] {
            let (setting, reason) = rejected(LatencyProbeBuilder::new().function(name));
            assert_eq!(setting, "function");
            assert!(reason.contains("is not a function's name"), "{reason}");
        }
        for name in ["ip_rcv", "___pskb_trim", "nf_nat:nf_nat_ipv4_fn", "ip_rcv_finish.isra.0", "tcp-bbr:f"] {
            assert!(is_name(name), "{name}");
        }
    }

    /// A function has one span.
    #[test]
    fn no_function_twice() {
        let (_, reason) = rejected(builder().function("udp_sendmsg").function("ip_rcv"));
        assert_eq!(reason, "`ip_rcv` is named twice: one span for each function");
    }

    /// Absurd sizes are refused before anything is allocated.
    #[test]
    fn sizes() {
        for calls in [0, (1 << 20) + 1, usize::MAX] {
            assert_eq!(rejected(builder().in_flight(calls)).0, "in_flight");
        }
        for events in [0, (1 << 24) + 1, usize::MAX] {
            assert_eq!(rejected(builder().channel_capacity(events)).0, "channel_capacity");
        }
        for bytes in [0, (1 << 30) + 1, usize::MAX] {
            assert_eq!(rejected(builder().ring_bytes(bytes)).0, "ring_bytes");
        }
        let (_, reason) = rejected(builder().in_flight(0));
        assert_eq!(reason, "0 calls in flight: 1 to 1048576 are possible");
    }
}
