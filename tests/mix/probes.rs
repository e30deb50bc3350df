//! Random probes.

use std::fmt;
use std::time::Duration;

use dwell::{ErrorKind, Events, GroupBy, Hook, Key, LatencyProbe, LatencyProbeBuilder, Restart, Span, Stage};
use fastrand::Rng;

use super::Hooks;

/// Those that are measured, and counted beside that.
pub const FUNCTIONS: [&str; 5] = ["ip_rcv", "udp_sendmsg", "udp_recvmsg", "tcp_sendmsg", "tcp_recvmsg"];

/// What there may be from function to function,
const BETWEEN_FUNCTIONS: [(&str, &str, &[Key]); 4] = [
    ("ip_rcv", "udp_rcv", &[Key::Skb, Key::Flow]),
    ("ip_rcv", "tcp_v4_rcv", &[Key::Skb, Key::SkbHead]),
    ("udp_sendmsg", "udp_recvmsg", &[Key::Sock, Key::Thread]),
    ("tcp_sendmsg", "tcp_recvmsg", &[Key::Thread]),
];

/// and from tracepoint to tracepoint.
const BETWEEN_TRACEPOINTS: [(&str, &str, &[Key]); 3] = [
    ("net_dev_queue", "netif_receive_skb", &[Key::Skb, Key::SkbHead, Key::Flow, Key::Thread]),
    ("net_dev_queue", "consume_skb", &[Key::Skb, Key::Thread]),
    ("netif_receive_skb", "net_dev_queue", &[Key::FlowReply, Key::Thread]),
];

const FILTERS: &[&str] = &[
    "udp",
    "tcp",
    "port 9",
    "net 127.0.0.0/8",
    "not udp",
    "ip6",
    #[cfg(feature = "pcap")]
    "pcap \"udp[8] = 7\"",
];

/// A probe, as it was asked for.
pub struct Wish {
    pub builder: LatencyProbeBuilder,
    filtered: bool,
    slowest: bool,
    backpressure: bool,
    /// All of it, in words.
    words: Vec<String>,
}

impl Wish {
    pub fn random(rng: &mut Rng, hooks: Hooks) -> Self {
        let builder = LatencyProbe::builder().best_effort();
        let mut wish = Self { builder, filtered: false, slowest: false, backpressure: false, words: Vec::new() };
        for n in 0..rng.usize(1..=2) {
            let (span, words) = span(rng, hooks, n);
            wish.set(words, |builder| builder.span(span));
        }
        let events = random_events(rng);
        wish.set(format!("{events:?}"), |builder| builder.events(events));
        // What makes programs large, and so attaching long, not too often.
        if rng.u8(0..5) == 0 {
            let filter = FILTERS[rng.usize(..FILTERS.len())];
            wish.filtered = true;
            wish.set(format!("filter {filter}"), |builder| builder.filter(filter.parse().expect("a filter")));
        }
        if rng.u8(0..6) == 0 {
            wish.set("identify", LatencyProbeBuilder::identify);
        }
        if rng.u8(0..6) == 0 {
            wish.set("stories", LatencyProbeBuilder::stories);
        }
        if rng.u8(0..3) == 0 {
            wish.slowest = true;
            wish.set("keep_slowest", |builder| builder.keep_slowest(5));
        }
        if hooks == Hooks::All && rng.u8(0..3) == 0 {
            wish.set("frames", LatencyProbeBuilder::frames);
        }
        if rng.u8(0..6) == 0 {
            wish.set("plain_tracepoints", LatencyProbeBuilder::plain_tracepoints);
        }
        if rng.bool() {
            let age = [Duration::from_micros(200), Duration::from_millis(5), Duration::from_secs(10)][rng.usize(..3)];
            wish.set(format!("max_age {age:?}"), |builder| builder.max_age(age));
        }
        let in_flight = [1, 2, 8, 64, 8_192][rng.usize(..5)];
        wish.set(format!("in_flight {in_flight}"), |builder| builder.in_flight(in_flight));
        let ring_bytes = [1, 8 << 10, 64 << 10, 1 << 20][rng.usize(..4)];
        wish.set(format!("ring_bytes {ring_bytes}"), |builder| builder.ring_bytes(ring_bytes));
        let capacity = [1, 16, 1_000, 100_000][rng.usize(..4)];
        wish.set(format!("channel_capacity {capacity}"), |builder| builder.channel_capacity(capacity));
        if rng.u8(0..4) == 0 {
            wish.backpressure = true;
            wish.set("backpressure", LatencyProbeBuilder::backpressure);
        }
        wish
    }

    fn set(&mut self, words: impl Into<String>, change: impl FnOnce(LatencyProbeBuilder) -> LatencyProbeBuilder) {
        self.words.push(words.into());
        self.builder = change(self.builder.clone());
    }

    pub fn is_filtered(&self) -> bool {
        self.filtered
    }

    pub fn has_backpressure(&self) -> bool {
        self.backpressure
    }

    pub fn keeps_slowest(&self) -> bool {
        self.slowest
    }
}

impl fmt::Display for Wish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words.join(", "))
    }
}

/// What a kernel, or a span, may not have.
pub fn is_expected(error: &ErrorKind) -> bool {
    matches!(
        error,
        ErrorKind::NoKey { .. }
            | ErrorKind::NoTypes { .. }
            | ErrorKind::NoHeaders { .. }
            | ErrorKind::NotGrouped { .. }
            | ErrorKind::NotFiltered { .. }
            | ErrorKind::StageUnavailable { .. }
            // The same span by another name.
            | ErrorKind::Config { setting: "span", .. }
    )
}

fn random_events(rng: &mut Rng) -> Events {
    match rng.u8(0..5) {
        0 => Events::None,
        1 => Events::OverThreshold(Duration::from_micros(rng.u64(1..200))),
        2 => Events::OneIn(rng.u32(2..20)),
        _ => Events::All,
    }
}

/// One of each kind, with a name of its own but for functions, which the control knows by theirs.
fn span(rng: &mut Rng, hooks: Hooks, n: usize) -> (Span, String) {
    let kind = if hooks == Hooks::All { rng.u8(0..5) } else { 4 };
    let (mut span, mut words) = match kind {
        // Not the same twice.
        0 | 1 => {
            let name = if n == 0 { FUNCTIONS[rng.usize(..3)] } else { FUNCTIONS[rng.usize(3..FUNCTIONS.len())] };
            (Span::function(name), name.to_owned())
        }
        2 => {
            let stage = Stage::ALL[rng.usize(..Stage::ALL.len())];
            (Span::stage(stage).named(format!("{n}")), stage.to_string())
        }
        3 => {
            let (from, to, keys) = BETWEEN_FUNCTIONS[rng.usize(..BETWEEN_FUNCTIONS.len())];
            between(rng, n, Hook::entry(from), Hook::entry(to), keys)
        }
        _ => {
            let (from, to, keys) = BETWEEN_TRACEPOINTS[rng.usize(..BETWEEN_TRACEPOINTS.len())];
            between(rng, n, Hook::tracepoint(from), Hook::tracepoint(to), keys)
        }
    };
    if rng.u8(0..4) == 0 {
        let by = [GroupBy::Cpu, GroupBy::Interface, GroupBy::Protocol, GroupBy::LocalPort][rng.usize(..4)];
        let most = [1, 4, 256][rng.usize(..3)];
        words += &format!(" by {by:?}, {most} groups");
        span = span.grouped_by(by).max_groups(most);
    }
    if rng.u8(0..4) == 0 {
        let events = random_events(rng);
        words += &format!(" {events:?}");
        span = span.events(events);
    }
    (span, words)
}

fn between(rng: &mut Rng, n: usize, from: Hook, to: Hook, keys: &[Key]) -> (Span, String) {
    let key = keys[rng.usize(..keys.len())];
    let mut words = format!("{from}..{to} by {key:?}");
    let mut span = Span::between(from, to).keyed_by(key).named(format!("{n}"));
    if rng.bool() {
        words += " with abandoned";
        span = span.with_abandoned();
    }
    if rng.bool() {
        words += " keeping the first";
        span = span.on_restart(Restart::KeepFirst);
    }
    (span, words)
}
