//! What `watch` is asked for.

use std::time::Duration;

use clap::{ArgGroup, Parser};
use dwell::{Events, Filter, GroupBy, Hook, Key, LatencyProbe, LatencyProbeBuilder, Span, Stage};
use humantime::parse_duration;

use crate::traffic::Traffic;

/// Measures how long calls of kernel functions take, and how long packets are on their way from one point of the kernel
/// to another.
///
/// Ends after --count events, --duration seconds, when all of --traffic has been seen, or on Ctrl-C.
#[derive(Parser)]
#[command(version, group = ArgGroup::new("what").required(true).multiple(true))]
pub struct Arguments {
    /// Kernel functions, as NAME or MODULE:NAME; can be repeated
    #[arg(long = "function", value_name = "NAME", num_args = 1.., group = "what")]
    functions: Vec<String>,

    /// From one hook to another: NAME is a function's entry, NAME:exit its exit, tp:NAME a raw tracepoint, and several
    /// are joined by +; can be repeated
    #[arg(long = "span", value_name = "FROM..TO", value_parser = span, group = "what")]
    spans: Vec<Span>,

    /// Ready-made spans of the network stack, whatever their functions are called here; can be repeated
    #[arg(long = "stage", value_name = "NAME", group = "what")]
    stages: Vec<Stage>,

    /// Print every stage, and what this kernel has for it
    #[arg(long, group = "what", conflicts_with_all = ["functions", "spans", "stages"])]
    pub list_stages: bool,

    /// What the ends of each --span are matched by: call, skb, skbhead, sock, flow, flow-reply or thread
    #[arg(long, default_value_t = Key::Skb)]
    key: Key,

    /// Only measure what passes, in tcpdump's words and some more: 'tcp dst port 443 and not src net 10.0.0.0/8',
    /// 'netns /run/netns/a', 'comm curl', 'cgroup /system.slice'; see the documentation of Filter
    #[arg(long, value_name = "EXPR")]
    filter: Option<Filter>,

    /// Only measure packets that pass a pcap expression, such as "tcp port 443 and host 10.0.0.1"; with --filter, both
    #[arg(long, value_name = "EXPR", value_parser = pcap)]
    pcap: Option<Filter>,

    /// Say of each event whose packet it is about; --filter and --pcap imply it
    #[arg(long)]
    identify: bool,

    /// Say of each event what the kernel was doing as its span ended, and print its stack; best with --min-latency
    #[arg(long)]
    pub stack: bool,

    /// Take the headers of packets within packets (IPIP, VXLAN) for --filter and --identify
    #[arg(long)]
    inner_headers: bool,

    /// Make events also of starts whose packet, socket or thread goes before the end
    #[arg(long)]
    pub abandoned: bool,

    /// Don't report what takes longer, such as 500ms, 5s or 2m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    max_age: Option<Duration>,

    /// Leave out what can't be measured, and say why
    #[arg(long)]
    best_effort: bool,

    /// Only make events of what takes at least so long, such as 50us or 1ms
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, group = "events")]
    min_latency: Option<Duration>,

    /// Only make events of one in N, picked by chance
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), group = "events")]
    sample: Option<u32>,

    /// Make no events: the kernel only counts, which costs least
    #[arg(long, group = "events", conflicts_with_all = ["count", "abandoned"])]
    no_events: bool,

    /// At the end, print the histogram of each span: all latencies, those that became no events, too
    #[arg(long)]
    histogram: bool,

    /// The same, with a histogram for each cpu, interface, protocol or local-port
    #[arg(long, value_name = "BY")]
    group_by: Option<GroupBy>,

    /// At the end, print the N slowest of each span, whether they became events or not
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    slowest: Option<u8>,

    /// Print one JSON object for each event, then for each of the slowest, for each histogram, and the ledger as the last line
    #[arg(long)]
    pub json: bool,

    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,

    /// End after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<Duration>,

    /// Once attached, send N datagrams, or N short TCP messages, to ourselves over 127.0.0.1
    #[arg(long, value_name = "udp:N|tcp:N")]
    pub traffic: Option<Traffic>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

fn span(text: &str) -> Result<Span, String> {
    let (from, to) = text.split_once("..").ok_or("two hooks are needed, FROM..TO")?;
    let hooks = |list: &str| {
        let hooks: Result<Vec<Hook>, _> = list.split('+').map(str::parse).collect();
        hooks.map_err(|error| error.to_string())
    };
    // Splitting gives one part at least.
    let (mut from, mut to) = (hooks(from)?.into_iter(), hooks(to)?.into_iter());
    let (Some(first), Some(last)) = (from.next(), to.next()) else { return Err("two hooks are needed".to_owned()) };
    let span = from.fold(Span::between(first, last), Span::or_from);
    Ok(to.fold(span, Span::or_to))
}

#[cfg(feature = "pcap")]
fn pcap(text: &str) -> Result<Filter, dwell::Error> {
    Filter::pcap(text)
}

#[cfg(not(feature = "pcap"))]
fn pcap(_: &str) -> Result<Filter, &'static str> {
    Err("this was built without pcap expressions: build it with --features pcap")
}

impl Arguments {
    /// The probe that was asked for.
    pub fn builder(&self) -> LatencyProbeBuilder {
        let mut builder = LatencyProbe::builder().events(self.events()).channel_capacity(self.channel_capacity());
        let functions = self.functions.iter().map(Span::function);
        let spans = self.spans.iter().map(|span| span.clone().keyed_by(self.key));
        let stages = self.stages.iter().copied().map(Span::stage);
        for mut span in functions.chain(spans).chain(stages) {
            if self.abandoned {
                span = span.with_abandoned();
            }
            if let Some(by) = self.group_by {
                span = span.grouped_by(by);
            }
            builder = builder.span(span);
        }
        if let Some(age) = self.max_age {
            builder = builder.max_age(age);
        }
        for filter in self.filters() {
            builder = builder.filter(filter.clone());
        }
        if self.stack {
            builder = builder.stories();
        }
        if self.identifies() {
            builder = builder.identify();
        }
        if self.inner_headers {
            builder = builder.inner_headers();
        }
        if let Some(count) = self.slowest {
            builder = builder.keep_slowest(count.into());
        }
        if self.best_effort { builder.best_effort() } else { builder }
    }

    /// Which latencies become events. The command line allows one of these at most.
    fn events(&self) -> Events {
        match (self.min_latency, self.sample) {
            _ if self.no_events => Events::None,
            (Some(latency), _) => Events::OverThreshold(latency),
            (None, Some(n)) => Events::OneIn(n),
            (None, None) => Events::All,
        }
    }

    /// All of these must be passed.
    fn filters(&self) -> impl Iterator<Item = &Filter> {
        self.filter.iter().chain(&self.pcap)
    }

    /// Whether events say whose packets they are about.
    pub fn identifies(&self) -> bool {
        (self.wants_events() || self.wants_slowest()) && (self.identify || self.filters().next().is_some())
    }

    pub fn wants_events(&self) -> bool {
        !self.no_events
    }

    pub fn wants_histograms(&self) -> bool {
        self.histogram || self.group_by.is_some()
    }

    pub fn wants_slowest(&self) -> bool {
        self.slowest.is_some()
    }

    /// Events that the channel holds. With our own traffic there is room for all that it can cause: printing is slower
    /// than the kernel.
    fn channel_capacity(&self) -> usize {
        const ROOM: u64 = 1 << 16;
        const EVENTS_PER_MESSAGE: u64 = 8;
        const MOST: u64 = 1 << 20;
        let messages = match self.traffic {
            Some(Traffic::Udp(count) | Traffic::Tcp(count)) => count,
            None => 0,
        };
        let spans = self.functions.len() + self.spans.len() + self.stages.len();
        messages.saturating_mul(EVENTS_PER_MESSAGE * spans as u64).clamp(ROOM, MOST) as usize
    }
}
