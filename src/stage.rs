//! Ready-made spans of the network stack: [`Stage`].

pub(crate) mod recipe;

use std::fmt;
use std::str::FromStr;

use crate::error::Error;
use crate::kernel::Kernel;
use crate::resolve::{Access, Resolver};
use crate::span::{Key, Span};

/// A part of the network stack that can be measured by its name, whatever the functions are called in this kernel.
///
/// ```no_run
/// use dwell::{LatencyProbe, Stage};
///
/// let probe = LatencyProbe::builder().stage(Stage::Qdisc).stage("udp-receive".parse()?).attach()?;
/// for event in probe.events().iter().take(10) {
///     println!("{event}");
/// }
/// # Ok::<(), dwell::Error>(())
/// ```
///
/// # What they measure
///
/// Stages contain each other, so that their times don't add up: receiving in softirq is one call within another, from
/// [`NapiPoll`](Self::NapiPoll) to [`TcpReceive`](Self::TcpReceive). All work in the whole machine, in every network
/// namespace.
///
/// | stage | from – to | what is in it, and what isn't seen |
/// |---|---|---|
/// | `napi-poll` | one poll of a device's queue, or of a CPU's backlog | all that receiving its packets takes, up to the sockets. Not busy polling. Linux 5.10: a whole run of the softirq, of many polls |
/// | `generic-xdp` | a program's run on a packet | XDP in the driver isn't seen. Linux 5.10: with the preparations for it |
/// | `tc-ingress` | the classifiers and actions for packets that come in | BPF programs attached by tcx (Linux 6.6) aren't seen |
/// | `tc-egress` | the same for packets that go out | the same. Before Linux 6.6 also the classifiers of a queueing discipline |
/// | `gro` | the try to merge a packet with earlier ones | only devices that do it: not `lo`, and `veth` only if told to |
/// | `netfilter-…` | all that is hooked in there, for one packet | only where something is: rules, connection tracking, SELinux. Packets received in a list are seen one by one. A packet queued to user space ends it |
/// | `firewall-rules` | one chain of nftables, one table of iptables | within `netfilter-…`. What their modules are loaded for, at the time of attaching. Not Linux 5.10 |
/// | `conntrack` | finding or making a packet's connection, confirming a new one | within `netfilter-…`, two calls for a packet that makes one. Not Linux 5.10 |
/// | `route-input` | IPv4: where a received packet goes | not called for loopback, nor where a socket is known already (early demux) |
/// | `route-output` | IPv4: which way to send | sockets remember it: once for a connection |
/// | `route-ipv6` | IPv6: both | the same |
/// | `ip-receive` | from IP's first look at a packet to TCP, UDP… or to forwarding | netfilter's pre-routing and local-in, the route, reassembly (of which only the last fragment's packet arrives) |
/// | `ip-send` | from IP's output to the device's queue | netfilter's local-out and post-routing, the neighbour. Packets that are cut into fragments or segments before the device are abandoned. Of TCP over IPv6 what no socket of its own sends isn't seen (`SYN ACK`, `RST`) |
/// | `neighbour` | the end of IP's output to the device's queue | waiting for ARP or neighbour discovery; next to nothing where the address is known |
/// | `qdisc` | a device's queue | also devices without one, and the bypass of an empty one: next to nothing. GSO in software: the packet is abandoned |
/// | `driver-transmit` | handing a packet, or a list of them, to the driver | on virtual devices all that follows there: on `lo` and `veth` up to the other end's backlog |
/// | `tcp-receive` | TCP's work on a segment, in softirq | the socket's wake-up, and what an acknowledgement lets go: sending more |
/// | `tcp-send` | `send()` and the like | blocking while the send buffer is full; sending itself, on loopback up to receiving |
/// | `udp-receive` | UDP's work on a datagram, in softirq | the socket's wake-up |
/// | `udp-send` | `send()` and the like | the same as for TCP. IPv4 addresses on IPv6 sockets are two calls, one in the other |
/// | `socket-queue` | from the socket's queue to the first byte read | the application's own delay. TCP segments that are merged in the queue, or end the stream, are abandoned; those that come out of order aren't seen |
/// | `accept` | from established to accepted | a connection's waiting for `accept()`. Those that SYN cookies or TCP Fast Open made aren't seen |
///
/// # Kernel
///
/// All are tested on Linux 5.10, 6.1, 6.12, 6.18 and 7.3, apart from those marked. What a kernel has for a stage is found
/// by looking, see [`resolve`](Self::resolve).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// `napi-poll`
    NapiPoll,
    /// `generic-xdp`
    GenericXdp,
    /// `tc-ingress`
    TcIngress,
    /// `tc-egress`
    TcEgress,
    /// `gro`
    Gro,
    /// `netfilter-pre-routing`
    NetfilterPreRouting,
    /// `netfilter-local-in`
    NetfilterLocalIn,
    /// `netfilter-forward`
    NetfilterForward,
    /// `netfilter-local-out`
    NetfilterLocalOut,
    /// `netfilter-post-routing`
    NetfilterPostRouting,
    /// `firewall-rules`
    FirewallRules,
    /// `conntrack`
    Conntrack,
    /// `route-input`
    RouteInput,
    /// `route-output`
    RouteOutput,
    /// `route-ipv6`
    RouteIpv6,
    /// `ip-receive`
    IpReceive,
    /// `ip-send`
    IpSend,
    /// `neighbour`
    Neighbour,
    /// `qdisc`
    Qdisc,
    /// `driver-transmit`
    DriverTransmit,
    /// `tcp-receive`
    TcpReceive,
    /// `tcp-send`
    TcpSend,
    /// `udp-receive`
    UdpReceive,
    /// `udp-send`
    UdpSend,
    /// `socket-queue`
    SocketQueue,
    /// `accept`
    Accept,
}

/// Which way a stage's packets go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    In,
    Out,
    Both,
}

impl Stage {
    /// Every stage.
    pub const ALL: &'static [Self] = &[
        Self::NapiPoll,
        Self::GenericXdp,
        Self::TcIngress,
        Self::TcEgress,
        Self::Gro,
        Self::NetfilterPreRouting,
        Self::NetfilterLocalIn,
        Self::NetfilterForward,
        Self::NetfilterLocalOut,
        Self::NetfilterPostRouting,
        Self::FirewallRules,
        Self::Conntrack,
        Self::RouteInput,
        Self::RouteOutput,
        Self::RouteIpv6,
        Self::IpReceive,
        Self::IpSend,
        Self::Neighbour,
        Self::Qdisc,
        Self::DriverTransmit,
        Self::TcpReceive,
        Self::TcpSend,
        Self::UdpReceive,
        Self::UdpSend,
        Self::SocketQueue,
        Self::Accept,
    ];

    /// Its name: `tc-ingress`, `netfilter-local-in`. Also the name of its span, unless that gets another.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// What it measures, in one line for people.
    ///
    /// ```
    /// for stage in dwell::Stage::ALL {
    ///     println!("{stage:24} {}", stage.description());
    /// }
    /// ```
    pub fn description(self) -> &'static str {
        self.row().2
    }

    /// Whether received packets pass it, or connections from outside. Some stages are passed both ways.
    pub fn is_receive(self) -> bool {
        self.row().1 != Way::Out
    }

    /// Whether packets that are sent pass it. Some stages are passed both ways.
    pub fn is_send(self) -> bool {
        self.row().1 != Way::In
    }

    /// What this kernel, with the modules that are loaded now, has for it.
    ///
    /// Reads `/sys` and `/proc`, loads nothing, and needs no privileges; so it doesn't tell whether this process may
    /// attach, nor whether the kernel allows it: [`Support`](crate::Support) does.
    ///
    /// ```
    /// use dwell::Stage;
    ///
    /// match Stage::FirewallRules.resolve() {
    ///     Ok(plan) => println!("{plan}"),      // firewall-rules: calls of nf_tables:nft_do_chain
    ///     Err(why) => println!("{why}"),       // ... its module nf_tables isn't loaded (`modprobe nf_tables`); ...
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StageUnavailable`](crate::ErrorKind::StageUnavailable) says of each function that would do why it can't be had;
    /// [`NoBtf`](crate::ErrorKind::NoBtf) if nothing can be looked up.
    pub fn resolve(self) -> Result<StagePlan, Error> {
        let kernel = Kernel::open()?;
        let resolver = Resolver::new(&kernel, Access::ALL);
        resolver.stage_plan(self)
    }

    #[rustfmt::skip]
    fn row(self) -> (&'static str, Way, &'static str) {
        use Way::{Both, In, Out};
        match self {
            Self::NapiPoll => ("napi-poll", In, "one poll of a device's receive queue or of a CPU's backlog, with all that its packets take"),
            Self::GenericXdp => ("generic-xdp", In, "an XDP program's run on a packet outside the driver"),
            Self::TcIngress => ("tc-ingress", In, "tc classifiers and actions on packets that come in; BPF programs attached by tcx aren't seen"),
            Self::TcEgress => ("tc-egress", Out, "tc classifiers and actions on packets that go out; BPF programs attached by tcx aren't seen"),
            Self::Gro => ("gro", In, "the try to merge a received packet with earlier ones"),
            Self::NetfilterPreRouting => ("netfilter-pre-routing", In, "netfilter hooks on received packets before they are routed"),
            Self::NetfilterLocalIn => ("netfilter-local-in", In, "netfilter hooks on packets for this host"),
            Self::NetfilterForward => ("netfilter-forward", Both, "netfilter hooks on packets that are forwarded"),
            Self::NetfilterLocalOut => ("netfilter-local-out", Out, "netfilter hooks on packets of this host"),
            Self::NetfilterPostRouting => ("netfilter-post-routing", Out, "netfilter hooks on packets about to leave"),
            Self::FirewallRules => ("firewall-rules", Both, "the rules of one nftables chain or one iptables table"),
            Self::Conntrack => ("conntrack", Both, "finding, making or confirming a packet's tracked connection"),
            Self::RouteInput => ("route-input", In, "looking up where a received IPv4 packet goes"),
            Self::RouteOutput => ("route-output", Out, "looking up which way to send over IPv4"),
            Self::RouteIpv6 => ("route-ipv6", Both, "looking up an IPv6 route, for packets received and sent"),
            Self::IpReceive => ("ip-receive", In, "from IP's first look at a packet to TCP, UDP or forwarding"),
            Self::IpSend => ("ip-send", Out, "from IP's output to the device's queue"),
            Self::Neighbour => ("neighbour", Out, "finding the next hop's hardware address, and waiting for ARP"),
            Self::Qdisc => ("qdisc", Out, "waiting in a device's queue until the driver gets the packet"),
            Self::DriverTransmit => ("driver-transmit", Out, "handing packets to a device's driver"),
            Self::TcpReceive => ("tcp-receive", In, "TCP's work on a received segment"),
            Self::TcpSend => ("tcp-send", Out, "send() and the like on a TCP socket, with blocking"),
            Self::UdpReceive => ("udp-receive", In, "UDP's work on a received datagram"),
            Self::UdpSend => ("udp-send", Out, "send() and the like on a UDP socket, with blocking"),
            Self::SocketQueue => ("socket-queue", In, "data's waiting in a TCP or UDP socket until the first byte is read"),
            Self::Accept => ("accept", In, "an established TCP connection's waiting for accept()"),
        }
    }
}

/// Its name.
impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// From a stage's name.
impl FromStr for Stage {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().find(|stage| stage.name() == text);
        found.copied().ok_or_else(|| Error::config("stage", no_stage(text)))
    }
}

/// From this similarity on (0 to 1) a name counts as near.
const NEAR: f64 = 0.85;

fn no_stage(text: &str) -> String {
    let similarity = |stage: &Stage| strsim::jaro_winkler(text, stage.name());
    let nearest = Stage::ALL.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    match nearest.filter(|stage| similarity(stage) >= NEAR) {
        Some(stage) => format!("`{text}` is no stage; did you mean `{stage}`?"),
        None => {
            let names: Vec<_> = Stage::ALL.iter().map(|stage| stage.name()).collect();
            format!("`{text}` is no stage: {} are", names.join(", "))
        }
    }
}

/// A span of the stage, with its name.
impl From<Stage> for Span {
    fn from(stage: Stage) -> Self {
        Self::stage(stage)
    }
}

/// What a kernel has for a stage, see [`Stage::resolve`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagePlan {
    /// The stage.
    pub stage: Stage,
    /// What its ends are matched by.
    pub key: Key,
    /// Where it starts, as in [`SpanInfo`](crate::SpanInfo): functions (each call's entry) or hooks.
    pub starts: Vec<String>,
    /// Where it ends; for calls the exits of the same functions.
    pub ends: Vec<String>,
    /// Which calls of these functions count, where not all do.
    pub only: Option<&'static str>,
    /// What else would belong to it and can't be had here, each with the reason.
    pub missing: Vec<String>,
}

/// `STAGE: calls of FUNCTION, FUNCTION, only ONLY`, or `STAGE: HOOK, HOOK → HOOK by KEY`. What is missing isn't shown.
impl fmt::Display for StagePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts = self.starts.join(", ");
        match self.key {
            Key::Call => {
                write!(f, "{}: calls of {starts}", self.stage)?;
                self.only.map_or(Ok(()), |only| write!(f, ", only {only}"))
            }
            key => write!(f, "{}: {starts} → {} by {key}", self.stage, self.ends.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::error::ErrorKind;

    /// Every stage is listed, in the order of its declaration.
    #[test]
    fn all() {
        for (n, &stage) in Stage::ALL.iter().enumerate() {
            assert_eq!(stage as usize, n, "{stage}");
        }
        assert_eq!(Stage::ALL.len(), Stage::Accept as usize + 1);
    }

    /// Names are unique, written as they are read, and documented; descriptions are one line.
    #[test]
    fn names() {
        let names: HashSet<_> = Stage::ALL.iter().map(|stage| stage.name()).collect();
        assert_eq!(names.len(), Stage::ALL.len());
        for &stage in Stage::ALL {
            assert_eq!(stage.to_string().parse::<Stage>().unwrap(), stage);
            assert_eq!(Span::from(stage).display_name(), stage.name());
            assert!(stage.name().bytes().all(|byte| byte.is_ascii_lowercase() || b"-6".contains(&byte)), "{stage}");
            assert!(stage.description().len() > 20 && !stage.description().contains('\n'), "{stage}");
            assert!(stage.is_receive() || stage.is_send(), "{stage}");
        }
    }

    /// A misspelt name is met with the right one, a wrong one with all.
    #[test]
    fn unknown_names() {
        let text = |name: &str| name.parse::<Stage>().unwrap_err().to_string();
        assert_eq!(text("tc-ingres"), "`tc-ingres` is no stage; did you mean `tc-ingress`?");
        assert_eq!(text("netfilter-localin"), "`netfilter-localin` is no stage; did you mean `netfilter-local-in`?");
        assert!(text("").starts_with("`` is no stage: napi-poll, generic-xdp, "));
    }

    /// On the kernel that runs the test: each stage is there, or it is said why not.
    #[test]
    fn resolves_or_explains() {
        for &stage in Stage::ALL {
            match stage.resolve() {
                Ok(plan) => {
                    println!("{plan} (missing: {:?})", plan.missing);
                    assert!(!plan.starts.is_empty() && !plan.ends.is_empty(), "{plan}");
                    assert!(plan.to_string().starts_with(stage.name()), "{plan}");
                }
                Err(error) => {
                    println!("{error}");
                    match error.kind() {
                        ErrorKind::StageUnavailable { stage: unavailable, reasons } => {
                            assert!(*unavailable == stage && !reasons.is_empty(), "{error}");
                        }
                        ErrorKind::NoBtf { .. } => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
    }
}
