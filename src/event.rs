//! What a finished span tells: [`LatencyEvent`] and the types of its fields.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::time::{ClockId, clock_gettime};

use crate::flow::Flow;
use crate::identity::Identity;
use crate::name::Name;
use crate::story::Story;

/// One finished span: how long it took, and whose it was.
///
/// For the span of a function, start and end are the entry and the exit of one and the same call.
///
/// ```
/// use std::time::Duration;
/// use dwell::LatencyEvent;
///
/// fn slow_packets(events: impl IntoIterator<Item = LatencyEvent>) -> usize {
///     let slow = events.into_iter().filter(|event| event.latency > Duration::from_micros(50));
///     slow.filter(|event| event.skb.is_some_and(|skb| skb.len > Some(1000))).count()
/// }
/// # assert_eq!(slow_packets([]), 0);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LatencyEvent {
    /// The span that ended.
    pub span: Name,
    /// Where it ended: the function, or the hook as [`Hook`](crate::Hook) is written. It tells the functions of a stage
    /// apart. An abandoned span ends at a hook that the probe chose.
    pub ended_at: Name,
    /// Whether it reached its end, or what became of it before.
    pub outcome: Outcome,
    /// What its start and its end were matched by.
    pub key: EventKey,
    /// When it started.
    pub start: MonotonicTime,
    /// How long it took, in whole nanoseconds, the probe's own share included. How much that is for a call, says
    /// [`LatencyProbe::empty_call`](crate::LatencyProbe::empty_call).
    pub latency: Duration,
    /// The process on which it ended: what user space calls the pid (the kernel's `tgid`), in the initial pid
    /// namespace. 0 is the idle task.
    ///
    /// In a softirq this is whatever process was interrupted, not the one that the packet belongs to.
    pub pid: u32,
    /// The thread on which it ended, in the initial pid namespace.
    pub tid: u32,
    /// The name of that thread.
    pub comm: Comm,
    /// The CPU on which it started.
    pub cpu_start: u32,
    /// The CPU on which it ended; another than [`cpu_start`](Self::cpu_start) if the call slept and was migrated, or the
    /// packet went on elsewhere.
    pub cpu_end: u32,
    /// What the function returned at whose exit the span ended; `None` where it returns nothing, or it ended elsewhere.
    ///
    /// A number narrower than 64 bits is extended by its type: a 32-bit `int` keeps its sign, so an error is negative
    /// as in the kernel (`-EAGAIN` is -11). A pointer is its address.
    pub ret: Option<i64>,
    /// The packet, where an argument at the end is a `struct sk_buff *`, or it is what was matched, and isn't NULL (the
    /// first, if several).
    pub skb: Option<Skb>,
    /// Whose packet it was, as it started. `None` where nobody asked for that
    /// ([`identify`](crate::LatencyProbeBuilder::identify)), or where it can't be had: at plain raw tracepoints, and where
    /// the packet may have been freed.
    pub identity: Option<Identity>,
    /// What the kernel was doing as it ended; `None` where nobody asked for that
    /// ([`stories`](crate::LatencyProbeBuilder::stories)).
    pub story: Option<Arc<Story>>,
}

impl LatencyEvent {
    /// When it ended.
    pub fn end(&self) -> MonotonicTime {
        MonotonicTime(self.start.0.saturating_add(self.latency.as_nanos() as u64))
    }
}

/// One line for a person: span, latency, thread, CPU, and what else there is.
impl fmt::Display for LatencyEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { span, latency, outcome, key, tid, comm, cpu_start, cpu_end, ret, skb, identity, story, .. } = self;
        write!(f, "{span} {latency:?} {comm}/{tid} cpu {cpu_start}")?;
        if cpu_start != cpu_end {
            write!(f, "->{cpu_end}")?;
        }
        if let Some(ret) = ret {
            write!(f, " ret {ret}")?;
        }
        if let Some(Skb { address, len }) = skb {
            write!(f, " skb {address:#x}")?;
            if let Some(len) = len {
                write!(f, " len {len}")?;
            }
        }
        if let EventKey::SkbHead(_) | EventKey::Sock(_) | EventKey::Flow(_) = key {
            write!(f, " {key}")?;
        }
        if let Some(identity) = identity {
            write!(f, " {identity}")?;
        }
        if let Some(story) = story {
            write!(f, " ({story})")?;
        }
        if *outcome != Outcome::Completed {
            write!(f, " {outcome}")?;
        }
        Ok(())
    }
}

/// How a span ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// It reached its end.
    Completed,
    /// Its packet was dropped before that.
    #[non_exhaustive]
    Dropped {
        /// Why, where the kernel says so (Linux 5.17 and later).
        reason: Option<DropReason>,
        /// The function that dropped it, by freeing it, as [`Span::function`](crate::Span::function) takes it:
        /// `nf_hook_slow`, or `MODULE:FUNCTION`. Where the compiler has made one function part of another, it is the
        /// latter.
        ///
        /// `None` where this process may not see the kernel's addresses as the first such probe is attached (that takes
        /// `CAP_SYSLOG`, unless `kernel.kptr_restrict` is 0), and for code without a name.
        by: Option<Name>,
    },
    /// Its packet was freed before that, after it had served its purpose.
    Consumed,
    /// Its packet, socket or thread went before that, and the kernel gives no cause.
    Released,
}

impl Outcome {
    /// `completed`, `dropped`, `consumed` or `released`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Dropped { .. } => "dropped",
            Self::Consumed => "consumed",
            Self::Released => "released",
        }
    }
}

/// In one word, and what there is to say of a drop: `dropped (NETFILTER_DROP) in nf_hook_slow`.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dropped { reason, by } if reason.is_some() || by.is_some() => {
                f.write_str(self.as_str())?;
                reason.map_or(Ok(()), |reason| write!(f, " ({reason})"))?;
                by.map_or(Ok(()), |by| write!(f, " in {by}"))
            }
            _ => f.pad(self.as_str()),
        }
    }
}

/// Why the kernel dropped a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DropReason {
    /// The running kernel's number for it. Numbers differ between versions.
    pub code: u32,
    /// The kernel's name for it, without `SKB_DROP_REASON_`, as in its type information; `None` for a number that isn't
    /// there, such as a subsystem's own.
    pub name: Option<Name>,
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.pad(name),
            None => write!(f, "reason {}", self.code),
        }
    }
}

/// What the ends of a span were matched by; see [`Key`](crate::Key).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKey {
    /// The invocation.
    Call,
    /// The address of the packet's `struct sk_buff`.
    Skb(u64),
    /// The address of the packet's data.
    SkbHead(u64),
    /// The address of the `struct sock`.
    Sock(u64),
    /// The flow, in the direction in which it started.
    Flow(Flow),
    /// The thread's id.
    Thread(u32),
    /// The CPU, whose idle task it was.
    Idle(u32),
}

/// `call`, `skb 0x...`, `skbhead 0x...`, `sock 0x...`, `udp 10.0.0.1:53 > 10.0.0.2:4711`, `thread 17`, `idle cpu 1`.
impl fmt::Display for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call => f.pad("call"),
            Self::Skb(address) => write!(f, "skb {address:#x}"),
            Self::SkbHead(address) => write!(f, "skbhead {address:#x}"),
            Self::Sock(address) => write!(f, "sock {address:#x}"),
            Self::Flow(flow) => flow.fmt(f),
            Self::Thread(tid) => write!(f, "thread {tid}"),
            Self::Idle(cpu) => write!(f, "idle cpu {cpu}"),
        }
    }
}

/// The packet of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Skb {
    /// The address of its `struct sk_buff`, the same as long as the packet lives. The kernel uses it again later.
    pub address: u64,
    /// Its length in bytes (`skb->len`) at the start of the span: by the end it may have been freed. `None` where it
    /// couldn't be read: the start had no packet, or one that might have been freed, or is a plain raw tracepoint; and where
    /// start and end may have had different ones, as with a socket or a flow.
    pub len: Option<u32>,
}

impl Skb {
    pub(crate) fn new(address: u64, len: Option<u32>) -> Self {
        Self { address, len }
    }
}

/// The name of a thread (`task->comm`): up to 15 bytes, any but NUL. Programs choose their own, so nothing says that
/// it is UTF-8 or printable.
///
/// Its `Display` replaces control characters and what isn't UTF-8, so that no thread's name can play tricks with a
/// terminal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Comm([u8; Self::SIZE]);

impl Comm {
    /// Bytes in the kernel, the NUL included (`TASK_COMM_LEN`).
    pub const SIZE: usize = 16;

    /// From the kernel's bytes; what follows the first NUL doesn't count.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        Self(bytes)
    }

    /// The bytes before the first NUL.
    pub fn as_bytes(&self) -> &[u8] {
        let len = self.0.iter().position(|&byte| byte == 0).unwrap_or(Self::SIZE);
        &self.0[..len]
    }

    /// As text; what isn't UTF-8 becomes U+FFFD.
    pub fn to_string_lossy(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(self.as_bytes())
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string_lossy(), f)
    }
}

impl fmt::Display for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.to_string_lossy();
        if text.chars().any(char::is_control) {
            let clean: String =
                text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
            return f.pad(&clean);
        }
        f.pad(&text)
    }
}

/// A point in time on the kernel's `CLOCK_MONOTONIC`: nanoseconds since boot, time in suspend excluded.
///
/// That is the clock of `bpf_ktime_get_ns()`. It is never set, so differences are exact whatever happens to the wall
/// clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonotonicTime(u64);

impl MonotonicTime {
    /// From nanoseconds of `CLOCK_MONOTONIC`.
    pub fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// The present.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        Self(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    /// The same point on the wall clock.
    ///
    /// The two clocks are compared now, not then: if the wall clock was set or the machine slept in between, the
    /// answer is off by that. It is exact to about a microsecond otherwise. A time before 1970 comes out as 1970.
    ///
    /// ```
    /// use std::time::SystemTime;
    /// use dwell::MonotonicTime;
    ///
    /// let wall = MonotonicTime::now().to_system_time();
    /// assert!(wall.elapsed().unwrap_or_default().as_secs() < 10);
    /// ```
    pub fn to_system_time(self) -> SystemTime {
        let (wall, now) = (SystemTime::now(), Self::now());
        let then = match self.0.checked_sub(now.0) {
            Some(ahead) => wall.checked_add(Duration::from_nanos(ahead)),
            None => wall.checked_sub(Duration::from_nanos(now.0 - self.0)),
        };
        then.unwrap_or(SystemTime::UNIX_EPOCH).max(SystemTime::UNIX_EPOCH)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn comm(text: &[u8]) -> Comm {
        let mut bytes = [0; Comm::SIZE];
        bytes[..text.len()].copy_from_slice(text);
        Comm::from_bytes(bytes)
    }

    pub(crate) fn event() -> LatencyEvent {
        LatencyEvent {
            span: "ip_rcv".into(),
            ended_at: "ip_rcv".into(),
            outcome: Outcome::Completed,
            key: EventKey::Call,
            start: MonotonicTime::from_nanos(5),
            latency: Duration::from_nanos(1_234),
            pid: 7,
            tid: 8,
            comm: comm(b"curl"),
            cpu_start: 1,
            cpu_end: 1,
            ret: None,
            skb: None,
            identity: None,
            story: None,
        }
    }

    /// Events and their parts go wherever a user wants to have them.
    #[test]
    fn travels() {
        fn is<T: Send + Sync + Clone + fmt::Debug + fmt::Display + 'static>() {}
        is::<LatencyEvent>();
        is::<Name>();
    }

    /// Handing events over costs what moving them costs.
    #[test]
    fn size() {
        assert_eq!(size_of::<EventKey>(), 40);
        assert_eq!(size_of::<LatencyEvent>(), 288);
    }

    /// The line for a person leaves out what isn't there.
    #[test]
    fn reads_well() {
        let mut event = event();
        assert_eq!(event.to_string(), "ip_rcv 1.234µs curl/8 cpu 1");
        event.cpu_end = 3;
        event.ret = Some(-11);
        event.skb = Some(Skb::new(0xffff_0000, Some(60)));
        assert_eq!(event.to_string(), "ip_rcv 1.234µs curl/8 cpu 1->3 ret -11 skb 0xffff0000 len 60");
        event.ret = None;
        event.skb = Some(Skb::new(0xffff_0000, None));
        event.key = EventKey::Sock(0xab);
        let reason = Some(DropReason { code: 8, name: Some("NETFILTER_DROP".into()) });
        event.outcome = Outcome::Dropped { reason, by: Some("nf_hook_slow".into()) };
        assert_eq!(
            event.to_string(),
            "ip_rcv 1.234µs curl/8 cpu 1->3 skb 0xffff0000 sock 0xab dropped (NETFILTER_DROP) in nf_hook_slow"
        );
    }

    /// Keys and drops read like what they are.
    #[test]
    fn keys_read_well() {
        assert_eq!(EventKey::Idle(3).to_string(), "idle cpu 3");
        let unnamed = Outcome::Dropped { reason: Some(DropReason { code: 131_072, name: None }), by: None };
        assert_eq!(unnamed.to_string(), "dropped (reason 131072)");
        assert_eq!(Outcome::Dropped { reason: None, by: Some("ip_rcv".into()) }.to_string(), "dropped in ip_rcv");
        assert_eq!(Outcome::Dropped { reason: None, by: None }.to_string(), "dropped");
    }

    /// A thread's name is kept as it is and shown as text, whatever its bytes.
    #[test]
    fn comm_takes_any_bytes() {
        assert_eq!(comm(b"").to_string(), "");
        assert_eq!(comm(b"kworker/0:1").to_string_lossy(), "kworker/0:1");
        let odd = comm(b"a\xff\x1b[2J");
        assert_eq!(odd.as_bytes(), b"a\xff\x1b[2J");
        assert_eq!(odd.to_string(), "a\u{fffd}\u{fffd}[2J");
        let full = Comm::from_bytes([b'x'; 16]);
        assert_eq!(full.as_bytes().len(), 16);
        let mut rest = [b'y'; 16];
        rest[3] = 0;
        assert_eq!(Comm::from_bytes(rest).as_bytes(), b"yyy");
    }

    /// The wall clock's distance is the monotonic clock's, in both directions, and no value makes it panic.
    #[test]
    fn wall_clock() {
        let now = MonotonicTime::now();
        let second = 1_000_000_000;
        let (early, late) = (
            MonotonicTime::from_nanos(now.as_nanos() - second / 2),
            MonotonicTime::from_nanos(now.as_nanos() + second),
        );
        let distance = late.to_system_time().duration_since(early.to_system_time()).unwrap();
        assert!(distance > Duration::from_millis(1_400) && distance < Duration::from_millis(1_600), "{distance:?}");
        MonotonicTime::from_nanos(0).to_system_time();
        MonotonicTime::from_nanos(u64::MAX).to_system_time();
    }

    /// An end beyond the end of time is no panic.
    #[test]
    fn end_saturates() {
        let mut event = event();
        assert_eq!(event.end().as_nanos(), 1_239);
        event.start = MonotonicTime::from_nanos(u64::MAX);
        assert_eq!(event.end().as_nanos(), u64::MAX);
    }
}
