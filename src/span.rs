//! What to measure: [`Span`], and by what its ends are matched: [`Key`].

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::Error;
use crate::events::Events;
use crate::filter::Filter;
use crate::group::GroupBy;
use crate::hook::{Hook, is_name};
use crate::stage::Stage;
use crate::stage::recipe::Recipe;

/// A stretch to measure: the calls of a function, or from one point of the kernel to another.
///
/// ```
/// use std::time::Duration;
/// use dwell::{Hook, Key, LatencyProbe, Span};
///
/// let queued = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("net_dev_start_xmit"))
///     .keyed_by(Key::Skb)
///     .named("queued")
///     .max_age(Duration::from_secs(5))
///     .with_abandoned();
/// let builder = LatencyProbe::builder().span(queued).span(Span::function("ip_rcv"));
/// # drop(builder);
/// ```
///
/// # How ends are matched
///
/// The first run of `to` with the same key ends what `from` started. A start isn't needed twice: what passes `to` again
/// is [`unmatched`](crate::SpanLedger::unmatched).
///
/// - **A key that starts again** before its end was met: by default the later start counts
///   ([`Restart::KeepLatest`]), the earlier one is [`overwritten`](crate::SpanLedger::overwritten).
/// - **A life that ends early**: a packet that is dropped, consumed or freed before `to` is
///   [`abandoned`](crate::SpanLedger::abandoned), so that its address, used again, never meets an old start. The same
///   for sockets and threads. [`with_abandoned`](Self::with_abandoned) makes events of them. Where `to` is itself such a
///   place (`kfree_skb`), the span ends there; one that passed another of them before (`consume_skb`) is abandoned.
/// - **A start that gets too old** is [`expired`](crate::SpanLedger::expired), see [`max_age`](Self::max_age).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a span is measured once a probe with it is attached"]
pub struct Span {
    pub(crate) name: Option<String>,
    pub(crate) shape: Shape,
    pub(crate) restart: Restart,
    pub(crate) max_age: Option<Duration>,
    pub(crate) with_abandoned: bool,
    pub(crate) events: Option<Events>,
    pub(crate) group_by: Option<GroupBy>,
    pub(crate) max_groups: usize,
    pub(crate) filter: Option<Filter>,
    /// A setter that its shape doesn't allow.
    misused: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Shape {
    Function(String),
    Between { from: Vec<Hook>, to: Vec<Hook>, key: Key },
    Stage(Stage),
}

/// What says that an end belongs to a start.
///
/// # Packets
///
/// | | `Skb` | `SkbHead` | `Flow` |
/// |---|---|---|---|
/// | what is compared | the address of the `struct sk_buff` | the address of its data (`skb->head`) | protocol, addresses, ports |
/// | clone | another packet, which has no start | the same packet: the first to arrive ends the span | the same flow |
/// | data moved (`pskb_expand_head`: more room, or made writable) | the same packet | abandoned | the same flow |
/// | GRO, several become one | the first goes on, the others are abandoned | likewise | the same flow |
/// | GSO, one becomes several | the packet is abandoned, its segments have no start | likewise | the same flow |
/// | fragments put together | one of them becomes the whole packet; all are abandoned | the first goes on | the later ones have no ports and so no flow |
/// | NAT | no matter | no matter, unless the data moves | another flow on the other side of it |
/// | encapsulation | the same packet | the same, if there was room for the header | the outermost header counts |
///
/// A packet that goes before its end is [abandoned](crate::SpanLedger::abandoned), so that its address, used again, never
/// meets an old start. That takes functions that can be traced: tracepoints alone don't see every packet go, since the
/// kernel frees many in silence. Where there are only tracepoints ([`SpanInfo::lives_are_seen`] is `false`), **choose hooks
/// such that whatever reaches `to` has passed `from`**, as every packet of the loopback device passes `net_dev_queue`
/// before `netif_receive_skb`; otherwise a packet that comes another way may be taken for an earlier one at its address. A
/// packet whose data is elsewhere is told apart, where tracepoints are typed, and [`max_age`](Span::max_age) bounds the
/// error.
///
/// [`SpanInfo::lives_are_seen`]: crate::SpanInfo::lives_are_seen
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Key {
    /// This very invocation: from the entry of a function to its own exit. Both hooks must be of the same function.
    Call,
    /// The packet, by the address of its `struct sk_buff`.
    Skb,
    /// The packet's data, by the address of `skb->head`, which clones share.
    SkbHead,
    /// The socket, by the address of its `struct sock`: an argument, a `struct socket`'s, or else a packet's own.
    Sock,
    /// Protocol, addresses and ports of the packet, outermost header, in the packet's direction. A socket stands for the
    /// direction in which it sends; one without a peer has no flow. Network namespaces aren't told apart.
    ///
    /// Later fragments have no ports and so no flow, nor does a packet whose IP header isn't known yet (as at
    /// `netif_receive_skb`, from some drivers): they are counted as [`unkeyed`](crate::SpanLedger::unkeyed). Reading a
    /// packet's headers takes `bpf_probe_read_kernel()`, which the lockdown mode `confidentiality` forbids.
    Flow,
    /// As [`Flow`](Self::Flow), but `to` sees the opposite direction: from a request to its answer, or from a received
    /// packet to the socket that it is for.
    FlowReply,
    /// The thread that runs; on the idle task, the CPU. In interrupts and softirqs it is the thread that they
    /// interrupted.
    Thread,
}

/// What becomes of a start whose key starts again before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Restart {
    /// The later start replaces the earlier one. The latency is from the last start to the end.
    #[default]
    KeepLatest,
    /// The earlier start stays, and the later one is dropped. The latency is from the first start to the end.
    KeepFirst,
}

impl Key {
    /// Whether it is a packet's address, which has one life at a time.
    pub(crate) fn is_packet(self) -> bool {
        matches!(self, Self::Skb | Self::SkbHead)
    }
}

impl Span {
    /// Each call of a function, from entry to exit: `FUNCTION`, or `MODULE:FUNCTION`.
    pub fn function(name: impl Into<String>) -> Self {
        Self::new(Shape::Function(name.into()))
    }

    /// From one hook to another, keyed by [`Key::Skb`] until [`keyed_by`](Self::keyed_by) says otherwise.
    pub fn between(from: Hook, to: Hook) -> Self {
        Self::new(Shape::Between { from: vec![from], to: vec![to], key: Key::Skb })
    }

    /// A stage of the network stack, by whatever functions this kernel has for it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use dwell::{Span, Stage};
    ///
    /// let queued = Span::stage(Stage::Qdisc).max_age(Duration::from_secs(5));
    /// # drop(queued);
    /// ```
    pub fn stage(stage: Stage) -> Self {
        Self::new(Shape::Stage(stage))
    }

    pub(crate) fn new(shape: Shape) -> Self {
        Self {
            name: None,
            shape,
            restart: Restart::default(),
            max_age: None,
            with_abandoned: false,
            events: None,
            group_by: None,
            max_groups: 64,
            filter: None,
            misused: None,
        }
    }

    /// Also starts here. Only for a span between hooks.
    pub fn or_from(mut self, hook: Hook) -> Self {
        match &mut self.shape {
            Shape::Between { from, .. } => from.push(hook),
            Shape::Function(_) | Shape::Stage(_) => self.misused = Some("or_from"),
        }
        self
    }

    /// Also ends here. Only for a span between hooks.
    pub fn or_to(mut self, hook: Hook) -> Self {
        match &mut self.shape {
            Shape::Between { to, .. } => to.push(hook),
            Shape::Function(_) | Shape::Stage(_) => self.misused = Some("or_to"),
        }
        self
    }

    /// What the ends are matched by. A span of a function is keyed by the call, and by nothing else; a stage by what
    /// [`Stage::resolve`] says.
    pub fn keyed_by(mut self, by: Key) -> Self {
        match &mut self.shape {
            Shape::Between { key, .. } => *key = by,
            Shape::Function(_) if by == Key::Call => {}
            Shape::Function(_) | Shape::Stage(_) => self.misused = Some("keyed_by"),
        }
        self
    }

    /// Its name in events and in the ledger; by default the function, the stage, or `FROM..TO`.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// What becomes of a start whose key starts again. Calls can't.
    pub fn on_restart(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    /// Only what passes this is measured, beside the builder's own [`filter`](crate::LatencyProbeBuilder::filter), which must
    /// be passed as well. If there is one already, both.
    ///
    /// ```
    /// use dwell::{Filter, Span};
    ///
    /// let dns: Filter = "udp port 53".parse()?;
    /// let span = Span::function("ip_rcv").filter(dns);
    /// # drop(span);
    /// # Ok::<(), dwell::Error>(())
    /// ```
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = Filter::all([self.filter, Some(filter)]);
        self
    }

    /// What takes longer than this isn't reported: it is counted as [`expired`](crate::SpanLedger::expired). Between hooks,
    /// its start makes room for others.
    ///
    /// Defaults to the builder's [`max_age`](crate::LatencyProbeBuilder::max_age); without that to 60 seconds, and for
    /// calls to no bound.
    ///
    /// # Errors
    ///
    /// `attach` fails if it is 0 or more than 292 years.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// Makes events also of starts whose packet, socket or thread went before the end, see [`Outcome`](crate::Outcome).
    /// Their latency is the age that they reached, and [`events`](Self::events) says by that which become events: with
    /// [`Events::None`] none do.
    pub fn with_abandoned(mut self) -> Self {
        self.with_abandoned = true;
        self
    }

    /// Which of its latencies become events. Defaults to the builder's
    /// [`events`](crate::LatencyProbeBuilder::events).
    ///
    /// # Errors
    ///
    /// `attach` fails for a threshold of more than 292 years, and for one in 0.
    pub fn events(mut self, events: Events) -> Self {
        self.events = Some(events);
        self
    }

    /// Keeps a histogram of each group, in the kernel: see [`LatencyProbe::groups`](crate::LatencyProbe::groups).
    ///
    /// ```
    /// use dwell::{GroupBy, Span};
    ///
    /// let span = Span::function("ip_rcv").grouped_by(GroupBy::Interface).max_groups(16);
    /// # drop(span);
    /// ```
    ///
    /// # Errors
    ///
    /// `attach` fails if there is no packet or socket where the span starts; by protocol or port of a packet also if the
    /// kernel doesn't let its headers be read, as under the lockdown mode `confidentiality`.
    pub fn grouped_by(mut self, by: GroupBy) -> Self {
        self.group_by = Some(by);
        self
    }

    /// How many groups there is room for. Defaults to 64; each takes 10 KiB of kernel memory from the beginning, or 5
    /// KiB where calls are paired by [`Session`](crate::Pairing::Session). Grouping by CPU has room for all in any
    /// case.
    ///
    /// What finds no room is counted together, in [`Groups::rest`](crate::Groups::rest).
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 16,384, also if the span isn't grouped.
    pub fn max_groups(mut self, groups: usize) -> Self {
        self.max_groups = groups;
        self
    }

    /// The name that was given, or that follows from what is measured.
    pub(crate) fn display_name(&self) -> String {
        if let Some(name) = &self.name {
            return name.clone();
        }
        match &self.shape {
            Shape::Function(function) => function.clone(),
            Shape::Between { from, to, .. } => format!("{}..{}", list(from), list(to)),
            Shape::Stage(stage) => stage.name().to_owned(),
        }
    }

    /// Whether it may have other hooks than the entry and the exit of functions.
    pub(crate) fn has_hooks(&self) -> bool {
        match self.shape {
            Shape::Function(_) => false,
            Shape::Between { .. } => true,
            Shape::Stage(stage) => Recipe::of(stage).has_hooks(),
        }
    }

    /// Whether packets' headers have to be read. No stage does of itself.
    pub(crate) fn reads_headers(&self) -> bool {
        let flow = matches!(self.shape, Shape::Between { key: Key::Flow | Key::FlowReply, .. });
        flow || self.filter.is_some() || matches!(self.group_by, Some(GroupBy::Protocol | GroupBy::LocalPort))
    }

    /// What is wrong with it, as far as can be said without a kernel.
    pub(crate) fn complaint(&self) -> Option<String> {
        if self.name.as_ref().is_some_and(|name| name.is_empty() || name.chars().any(char::is_control)) {
            return Some("a span's name must have characters, and none that controls a terminal".to_owned());
        }
        if let Some(setter) = self.misused {
            return Some(format!("`{setter}` is only for spans between hooks, which `{}` isn't", self.display_name()));
        }
        match &self.shape {
            Shape::Function(name) if !is_name(name) => {
                Some(format!("{name:?} is not a function's name: FUNCTION or MODULE:FUNCTION is"))
            }
            Shape::Function(_) | Shape::Stage(_) => None,
            Shape::Between { from, to, .. } => from.iter().chain(to).find_map(Hook::complaint),
        }
    }
}

fn list(hooks: &[Hook]) -> String {
    let names: Vec<_> = hooks.iter().map(Hook::to_string).collect();
    names.join("+")
}

const KEYS: [(Key, &str); 7] = [
    (Key::Call, "call"),
    (Key::Skb, "skb"),
    (Key::SkbHead, "skbhead"),
    (Key::Sock, "sock"),
    (Key::Flow, "flow"),
    (Key::FlowReply, "flow-reply"),
    (Key::Thread, "thread"),
];

/// `call`, `skb`, `skbhead`, `sock`, `flow`, `flow-reply` or `thread`.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(KEYS.iter().find(|(key, _)| key == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for Key {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let key = KEYS.iter().find(|(_, name)| *name == text).map(|(key, _)| *key);
        key.ok_or_else(|| {
            let names: Vec<_> = KEYS.iter().map(|(_, name)| *name).collect();
            Error::config("key", format!("`{text}` is no key: {} are", names.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names say what is measured, until they are given.
    #[test]
    fn names() {
        let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::exit("ip_rcv"));
        assert_eq!(span.display_name(), "tp:net_dev_queue..ip_rcv:exit");
        assert_eq!(
            span.clone().or_to(Hook::entry("ipv6_rcv")).display_name(),
            "tp:net_dev_queue..ip_rcv:exit+ipv6_rcv"
        );
        assert_eq!(span.named("mine").display_name(), "mine");
        assert_eq!(Span::function("ip_rcv").display_name(), "ip_rcv");
        assert!(Span::function("ip_rcv").named("").complaint().is_some());
        assert!(Span::function("ip_rcv").named("a\x1b[2J").complaint().is_some());
        assert!(Span::between(Hook::entry("ip rcv"), Hook::entry("x")).complaint().is_some());
        assert_eq!(Span::function("ip_rcv").keyed_by(Key::Call).complaint(), None);
        let misused = Span::function("ip_rcv").keyed_by(Key::Skb).complaint().unwrap();
        assert_eq!(misused, "`keyed_by` is only for spans between hooks, which `ip_rcv` isn't");
    }

    /// Keys are written as they are read.
    #[test]
    fn keys() {
        for (key, name) in KEYS {
            assert_eq!(key.to_string(), name);
            assert_eq!(name.parse::<Key>().unwrap(), key);
        }
        let error = "tuple".parse::<Key>().unwrap_err().to_string();
        assert_eq!(error, "`tuple` is no key: call, skb, skbhead, sock, flow, flow-reply, thread are");
    }
}
