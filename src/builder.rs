//! What a user asks for: [`LatencyProbeBuilder`].

use std::num::NonZero;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;

use crate::batch;
use crate::decode::{Codec, EndCodec, Place, SpanCodec};
use crate::delivery::{Callback, Delivery};
use crate::driver::{self, Reader, Shared, Wishes};
use crate::error::Error;
use crate::events::{Events, LONGEST};
use crate::filter::Filter;
use crate::kernel::{self, Function, Kernel, PreemptCount, Symbolizer};
use crate::name::Name;
use crate::plan::{Body, End, HookPlan, Role, SpanPlan};
use crate::probe::{Failure, LatencyProbe, Receivers, SpanInfo};
use crate::resolve::{Access, Resolver};
use crate::span::Span;
use crate::stage::Stage;
use crate::view::EventView;

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
    spans: Vec<Span>,
    max_age: Option<Duration>,
    best_effort: bool,
    wait_for_modules: Duration,
    plain_tracepoints: bool,
    frames: bool,
    events: Events,
    filter: Option<Filter>,
    identify: bool,
    stories: bool,
    inner_headers: bool,
    slowest: usize,
    in_flight: usize,
    ring_bytes: Option<usize>,
    channel_capacity: usize,
    events_per_batch: Option<usize>,
    backpressure: bool,
}

const IN_FLIGHT: RangeInclusive<usize> = 1..=1 << 20;
const CHANNEL_CAPACITY: RangeInclusive<usize> = 1..=1 << 24;
const EVENTS_PER_BATCH: RangeInclusive<usize> = 1..=1 << 16;
const SLOWEST: RangeInclusive<usize> = 0..=64;
const GROUPS: RangeInclusive<usize> = 1..=1 << 14;
const RING_BYTES: RangeInclusive<usize> = 1..=driver::LARGEST_RINGS;

impl LatencyProbeBuilder {
    pub(crate) fn new() -> Self {
        Self {
            spans: Vec::new(),
            max_age: None,
            best_effort: false,
            wait_for_modules: Duration::ZERO,
            plain_tracepoints: false,
            frames: false,
            events: Events::All,
            filter: None,
            identify: false,
            stories: false,
            inner_headers: false,
            slowest: 0,
            in_flight: 8_192,
            ring_bytes: None,
            channel_capacity: 16_384,
            events_per_batch: None,
            backpressure: false,
        }
    }

    /// Measures each call of a kernel function, from entry to exit. Can be repeated.
    ///
    /// `name` is a function of the kernel, such as `ip_rcv`, or else of a loaded module. `MODULE:FUNCTION` says which
    /// module, where several have the name or the kernel has it as well. The span gets this name.
    ///
    /// # Errors
    ///
    /// `attach` fails if the name is empty, not a name, given twice, unknown, or of a function that can't be traced.
    pub fn function(self, name: impl Into<String>) -> Self {
        self.span(Span::function(name))
    }

    /// Measures a span. Can be repeated; each needs a name of its own.
    ///
    /// ```
    /// use dwell::{Hook, Key, LatencyProbe, Span};
    ///
    /// let from = Hook::tracepoint("netif_receive_skb");
    /// let builder = LatencyProbe::builder().span(Span::between(from, Hook::entry("tcp_v4_rcv")).keyed_by(Key::Skb));
    /// # drop(builder);
    /// ```
    ///
    /// # Errors
    ///
    /// `attach` fails if a hook is unknown, can't be traced, or has no argument that could be the key.
    pub fn span(mut self, span: Span) -> Self {
        self.spans.push(span);
        self
    }

    /// Measures a stage of the network stack. Can be repeated; its name is the stage's.
    ///
    /// ```
    /// use dwell::{LatencyProbe, Stage};
    ///
    /// let builder = LatencyProbe::builder().stage(Stage::TcIngress).stage(Stage::SocketQueue);
    /// # drop(builder);
    /// ```
    ///
    /// # Errors
    ///
    /// `attach` fails with [`StageUnavailable`](crate::ErrorKind::StageUnavailable) if this kernel has nothing for it.
    pub fn stage(self, stage: Stage) -> Self {
        self.span(Span::stage(stage))
    }

    /// Only what passes this is measured: which packets, sockets or threads. It is decided in the kernel, at the start of
    /// the span, before anything is stored. If there is one already, both must be passed; [`Span::filter`] is for one span.
    ///
    /// What is left out is in no counter, and its end meets nothing. What can't be told apart, since the packet couldn't
    /// be read, is left out as well, and [`unparsed`](crate::SpanLedger::unparsed).
    ///
    /// ```
    /// use dwell::{Filter, LatencyProbe};
    ///
    /// let filter: Filter = "tcp dst port 443 and not src host 10.0.0.0/8".parse()?;
    /// let builder = LatencyProbe::builder().function("ip_rcv").filter(filter);
    /// # drop(builder);
    /// # Ok::<(), dwell::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `attach` fails for a filter that can't be: too many tests, an interface, namespace or cgroup that isn't there; and with
    /// [`NotFiltered`](crate::ErrorKind::NotFiltered) where a span starts at a hook that hasn't what it asks for.
    pub fn filter(mut self, filter: Filter) -> Self {
        self.filter = Filter::all([self.filter, Some(filter)]);
        self
    }

    /// Has every event tell whose packet it is about: [`LatencyEvent::identity`](crate::LatencyEvent::identity). Off by
    /// default.
    ///
    /// It is read as a span starts, since by its end the packet may be gone, and so it costs every call, whether or not it
    /// becomes an event: some hundreds of instructions. Records get longer, so that fewer of them fit into the rings, and
    /// each function, or span between hooks, takes 384 KiB more of the kernel's memory.
    ///
    /// Of spans that start at functions or typed tracepoints. Packets' headers take `bpf_probe_read_kernel()`, which the
    /// lockdown mode `confidentiality` forbids.
    pub fn identify(mut self) -> Self {
        self.identify = true;
        self
    }

    /// Has every event tell what the kernel was doing as its span ended: [`LatencyEvent::story`](crate::LatencyEvent::story),
    /// with the kernel's stack. Off by default.
    ///
    /// Meant for those over a threshold ([`min_latency`](Self::min_latency)), and for the slowest that are
    /// [kept](Self::keep_slowest): to walk a stack takes some microseconds, after the end has been measured, and a record
    /// 760 bytes. Calls that make no record pay little more than without.
    ///
    /// Each takes memory, up to 2 KiB, which clones of its event share. Names for addresses take `CAP_SYSLOG`, unless the
    /// sysctls `kernel.kptr_restrict` and `kernel.perf_event_paranoid` are 0 and at most 1; without, stacks are addresses.
    /// They are looked up as the event is made: for the slowest,
    /// that is when they are asked for, and a module that has gone meanwhile has no names any more.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use dwell::LatencyProbe;
    ///
    /// let probe = LatencyProbe::builder().function("ip_rcv").min_latency(Duration::from_micros(50)).stories().attach()?;
    /// for event in probe.events() {
    ///     println!("{event}");                 // ip_rcv 61.3µs swapper/1/0 cpu 1 ret 0 skb 0x... len 60 (softirq)
    ///     if let Some(story) = &event.story {
    ///         println!("{}", story.stack);     // ip_rcv+0x5, and on the next lines what has called it
    ///     }
    /// }
    /// # Ok::<(), dwell::Error>(())
    /// ```
    pub fn stories(mut self) -> Self {
        self.stories = true;
        self
    }

    /// Has the headers within a packet count, where it carries another: by IPIP (IPv4 or IPv6 in IPv4 or IPv6) or VXLAN (UDP
    /// port 4789), one level deep. By default the outer ones do.
    ///
    /// For [`identify`](Self::identify), and for filters.
    pub fn inner_headers(mut self) -> Self {
        self.inner_headers = true;
        self
    }

    /// Which latencies become events, for each span that doesn't say otherwise: see [`Span::events`]. Defaults to
    /// [`Events::All`]. Histograms and ledger count all.
    ///
    /// # Errors
    ///
    /// `attach` fails for a threshold of more than 292 years, and for one in 0.
    pub fn events(mut self, events: Events) -> Self {
        self.events = events;
        self
    }

    /// Makes events only of what takes at least so long: [`Events::OverThreshold`], with 0 to 292 years.
    ///
    /// The same setting as [`events`](Self::events): the last call of either counts.
    ///
    /// # Errors
    ///
    /// `attach` fails if it is more than 292 years.
    pub fn min_latency(self, latency: Duration) -> Self {
        self.events(Events::OverThreshold(latency))
    }

    /// What takes longer isn't reported, for each span that doesn't say otherwise: see [`Span::max_age`].
    ///
    /// Defaults to 60 seconds between hooks, and for calls to no bound.
    ///
    /// # Errors
    ///
    /// `attach` fails if it is 0 or more than 292 years.
    pub fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// Attaches what can be attached, and leaves out what can't: those spans are found in
    /// [`LatencyProbe::failures`], each with the error that explains it. By default one of them fails all.
    ///
    /// # Errors
    ///
    /// `attach` still fails if no span is left, with what was wrong with the first.
    pub fn best_effort(mut self) -> Self {
        self.best_effort = true;
        self
    }

    /// Has `attach` wait for modules that aren't loaded yet, for so long at most: for agents that are started with the
    /// machine. Defaults to 0: what isn't loaded fails at once.
    ///
    /// Only where that is what keeps a function from being measured, as [`Error::missing_module`] tells: it was given as
    /// `MODULE:FUNCTION`, or a module that `depmod` knows exports it. Until all of them have come, nothing is attached. Of
    /// tracepoints nobody knows which module will bring them. What comes later than that, a second probe can measure.
    ///
    /// A module isn't unloaded while a probe is on one of its functions: the kernel refuses it.
    ///
    /// # Errors
    ///
    /// `attach` fails if it is more than 292 years; and once the time is up, as it would have at once, or, with
    /// [`best_effort`](Self::best_effort), without what has not come.
    pub fn wait_for_modules(mut self, time: Duration) -> Self {
        self.wait_for_modules = time;
        self
    }

    /// Has the kernel keep the `count` slowest latencies of each span, with all that events tell, until
    /// [`LatencyProbe::slowest`] asks for them. Defaults to 0: none.
    ///
    /// Whatever becomes an event: also with [`Events::None`], and then without a ring, or a thread. What is abandoned isn't
    /// among them.
    ///
    /// Each latency is compared with the least that is kept on its CPU, and nearly all calls have done with that; but calls
    /// get dearer, since the programs that cost least don't do it. For each span, and each CPU that there can be, it takes
    /// 128 bytes of the kernel's memory, and for each that is kept 176 bytes of calls and 288 of spans between hooks, or
    /// 480 with [`identify`](Self::identify), 1,536 with [`stories`](Self::stories): with 64 of them on 16 CPUs at most
    /// 1.5 MiB.
    ///
    /// ```no_run
    /// use dwell::{Events, LatencyProbe};
    ///
    /// let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).keep_slowest(5).attach()?;
    /// std::thread::sleep(std::time::Duration::from_secs(10));
    /// for event in probe.slowest("ip_rcv")?.events {
    ///     println!("{event}");
    /// }
    /// # Ok::<(), dwell::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `attach` fails if it is more than 64.
    pub fn keep_slowest(mut self, count: usize) -> Self {
        self.slowest = count;
        self
    }

    /// Uses plain raw tracepoints also where the kernel allows typed ones: for tests of what happens where it doesn't.
    #[doc(hidden)]
    pub fn plain_tracepoints(mut self) -> Self {
        self.plain_tracepoints = true;
        self
    }

    /// Pairs calls by frames also where the kernel has sessions: for tests of what happens where it doesn't.
    #[doc(hidden)]
    pub fn frames(mut self) -> Self {
        self.frames = true;
        self
    }

    /// Room for this many started spans in flight, for each function and each span between hooks: entered and not yet
    /// returned from, or on the way from one hook to another. Defaults to 8,192.
    ///
    /// That is plenty for functions that run to their end on a CPU. For those that sleep (`inet_csk_accept`,
    /// `tcp_recvmsg`), it should be the number of threads that may sleep in them at once. A call that finds no room is
    /// counted as [`untracked`](crate::SpanLedger::untracked). Each function of a span, or a span between hooks, takes
    /// 272 KiB of kernel memory, and about 100 bytes for each call beyond 4,096; before Linux 5.12, where all wait in a
    /// hash map, for each call.
    ///
    /// With fewer than 8,192 calls get dearer: the programs that cost least need the whole table.
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 1,048,576.
    pub fn in_flight(mut self, calls: usize) -> Self {
        self.in_flight = calls;
        self
    }

    /// The memory for records on their way from the kernel to the reader thread, for the probe. Defaults to 4 MiB, or, if
    /// that is more, to 128 KiB for each CPU that there can be.
    ///
    /// Each CPU has a ring of its own, of an equal share, in which the number of records is rounded down to a power of two:
    /// at least 8, and of up to 4 MiB. A record takes 88 bytes, 144 if any span between hooks has events, 240 with
    /// [`identify`](Self::identify), and 768 with [`stories`](Self::stories). While the ring of its CPU is full, an event is dropped and counted as
    /// [`ring_dropped`](crate::SpanLedger::ring_dropped).
    ///
    /// Linux before 5.12 has one ring for all CPUs, rounded up to a power of two and to the page size. If no span wants
    /// events there is none.
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 byte to 1 GiB, or if there is no memory for it.
    pub fn ring_bytes(mut self, bytes: usize) -> Self {
        self.ring_bytes = Some(bytes);
        self
    }

    /// How many events the channel holds. Defaults to 16,384.
    ///
    /// Its memory (about 290 bytes for each) is allocated by `attach`; [stories](Self::stories) come on top, up to 2 KiB for
    /// each. While it is full, events are dropped and counted
    /// as [`channel_dropped`](crate::SpanLedger::channel_dropped). With [`in_batches`](Self::in_batches) it is rounded up
    /// to whole batches, two at least, and memory is taken as batches fill. With a callback it has no effect.
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 16,777,216.
    pub fn channel_capacity(mut self, events: usize) -> Self {
        self.channel_capacity = events;
        self
    }

    /// While the channel is full, or the batches are, the reader waits for the program instead of dropping events. Defaults
    /// to dropping.
    ///
    /// Then the rings fill up, and the kernel's programs drop what finds no room: so nothing is dropped until both are full,
    /// and what is counts as [`ring_dropped`](crate::SpanLedger::ring_dropped). The traffic never waits. Which to choose:
    /// without backpressure the newest events are lost that find the channel full, of any CPU; with it, those of the
    /// busiest CPUs. It takes no more memory.
    ///
    /// A program that begins to read again is noticed after 16 ms at most, so the channel should hold what may come in
    /// that time. [`stop`](LatencyProbe::stop) waits half a second for the program to read, and drops what is left. With a
    /// callback this has no effect: the reader always waits for it.
    pub fn backpressure(mut self) -> Self {
        self.backpressure = true;
        self
    }

    /// Hands events over in batches of up to so many, by [`LatencyProbe::batches`] instead of
    /// [`LatencyProbe::events`]. Defaults to one by one; 1,024 is a good size, and larger ones gain nothing.
    ///
    /// For high rates: sending and receiving takes a fraction of the time for each event, and no memory is allocated once
    /// batches go round, but for stories. A batch is handed over when it is full, or when there are no more events at the moment and no
    /// other batch waits to be received. So at a low rate events come as soon as one by one, and no later than 100 ms after
    /// the program has received what was before them. Batches can't be waited for in crossbeam's `select!`.
    ///
    /// # Errors
    ///
    /// `attach` fails if it isn't in 1 to 65,536. [`attach_with`](Self::attach_with) fails.
    pub fn in_batches(mut self, events_per_batch: usize) -> Self {
        self.events_per_batch = Some(events_per_batch);
        self
    }

    /// Attaches to the kernel, and returns once every hook is live: from then on each call counts.
    ///
    /// On failure nothing is left attached. Either comes quickly, within some tens of milliseconds for each function, of
    /// which up to four are attached at once, on threads that have ended when this returns.
    /// Nothing is printed; for what libbpf has to say see [`set_libbpf_log`](crate::set_libbpf_log).
    ///
    /// # Errors
    ///
    /// Any [`ErrorKind`](crate::ErrorKind): the settings are checked first, then the privileges, then everything is looked
    /// up, and only then are programs loaded (but for trials that end at once, the first time in a process).
    pub fn attach(self) -> Result<LatencyProbe, Error> {
        self.validate()?;
        let backpressure = self.backpressure;
        let (delivery, receivers) = match self.events_per_batch {
            None => {
                let (sender, events) = bounded(self.channel_capacity);
                (Delivery::Events { sender, backpressure }, Receivers { events, ..Receivers::closed() })
            }
            Some(size) => {
                let (sender, batches) = batch::channel(size, self.channel_capacity);
                (Delivery::Batches { sender, backpressure }, Receivers { batches, ..Receivers::closed() })
            }
        };
        self.attach_to(delivery, receivers)
    }

    /// Attaches as [`attach`](Self::attach) does, and calls `callback` with each event, where the kernel wrote it, on the
    /// thread that reads events.
    ///
    /// The cheapest way to have events: nothing is copied, sent or allocated. While `callback` runs, nothing else is read;
    /// if it takes too long, the ring fills up, and events are dropped and counted as
    /// [`ring_dropped`](crate::SpanLedger::ring_dropped). It may stop the probe, or drop it.
    ///
    /// [`LatencyProbe::stop`] has it called with what is left, for half a second at most; later events count as
    /// [`channel_dropped`](crate::SpanLedger::channel_dropped). It waits no longer for a callback that doesn't return: the
    /// thread is left to itself then, and ends, with the memory of the rings, when the callback returns.
    ///
    /// If it panics, that is caught, and it isn't called again: the event at which it did so counts as
    /// [`delivered`](crate::SpanLedger::delivered), later ones as
    /// [`channel_dropped`](crate::SpanLedger::channel_dropped). Nothing else happens; the panic's message goes where the
    /// program's panic hook sends it.
    ///
    /// [`LatencyProbe::events`] and [`LatencyProbe::batches`] are empty and closed. If no span wants events, `callback`
    /// is dropped and never called.
    ///
    /// ```no_run
    /// use std::sync::mpsc;
    /// use std::time::Duration;
    /// use dwell::LatencyProbe;
    ///
    /// let (sender, slow) = mpsc::channel();
    /// let probe = LatencyProbe::builder().function("ip_rcv").attach_with(move |event| {
    ///     if event.latency() > Duration::from_millis(1) {
    ///         let _ = sender.send(event.to_event());
    ///     }
    /// })?;
    /// println!("{}", slow.recv()?);
    /// # drop(probe);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As of [`attach`](Self::attach); and if [`in_batches`](Self::in_batches) was asked for.
    pub fn attach_with(self, callback: impl FnMut(&EventView<'_>) + Send + 'static) -> Result<LatencyProbe, Error> {
        self.validate()?;
        if self.events_per_batch.is_some() {
            return Err(Error::config("in_batches", "a callback gets events one by one: use `attach()` for batches"));
        }
        self.attach_to(Delivery::Callback(Callback::new(callback)), Receivers::closed())
    }

    fn attach_to(self, delivery: Delivery, receivers: Receivers) -> Result<LatencyProbe, Error> {
        kernel::check_privileges()?;
        let access = self.access();
        let deadline = Instant::now() + self.wait_for_modules;
        let (kernel, plans, mut failures) = loop {
            let kernel = Kernel::open()?;
            let resolved = self.resolve(&kernel, access);
            let missing = match &resolved {
                Ok((_, failures)) => failures.missing_modules(),
                Err(error) => error.missing_module().into_iter().collect(),
            };
            if missing.is_empty() || !kernel::wait_for_any(&missing, deadline) {
                let (plans, failures) = resolved?;
                break (kernel, plans, failures);
            }
        };

        let store = driver::choose_store()?;
        let told = plans.iter().any(|plan| plan.told);
        let symbols = (told || plans.iter().any(tells_who_drops)).then(Symbolizer::shared);
        let preempt_count =
            symbols.as_deref().filter(|_| told).and_then(|symbols| PreemptCount::find(&kernel, symbols));
        let streamed = || plans.iter().filter(|plan| plan.events.are_wanted());
        let wishes = Wishes {
            ring_bytes: streamed().next().map(|_| self.bytes_of_rings()),
            records: streamed().map(|plan| plan.more().needs).max().unwrap_or(0),
            typed: access.types,
            headers: access.headers,
            preempt_count,
            sessions: !self.frames && plans.iter().any(|plan| matches!(plan.body, Body::Calls(_))),
        };
        let shared = Shared::create(store, wishes, kernel.core_types())?;
        // Reading before anything writes, so that attaching many functions on a busy machine loses no event.
        let codec = Arc::new(codec(&kernel, &plans, access.types, symbols));
        let placed: Vec<_> = codec.spans.iter().map(|span| span.place).zip(&plans).collect();
        let reader = Reader::spawn(&shared, Arc::clone(&codec), delivery)?;
        let mut spans = Vec::with_capacity(plans.len());
        let attached = driver::attach_all(&shared, &placed, self.in_flight as u32, self.best_effort);
        for (plan, attached) in plans.iter().zip(attached) {
            let Some(attached) = failures.unless_strict(&plan.name, attached)? else { continue };
            spans.push((SpanInfo::new(plan, attached.pairing(), store, access.types), attached));
        }
        if let Some(symbols) = codec.symbols.as_ref().filter(|_| told) {
            symbols.note_programs();
        }
        let failures = failures.unless_all(spans.is_empty())?;
        let switch = shared.switch_on()?;
        Ok(LatencyProbe::new(spans, failures, switch, codec, reader, receivers))
    }

    /// What this kernel has for the spans.
    fn resolve(&self, kernel: &Kernel, access: Access) -> Result<(Vec<SpanPlan>, Failures), Error> {
        let resolver = Resolver {
            max_age: self.max_age,
            events: self.events,
            filter: self.filter.as_ref(),
            identify: self.identify,
            stories: self.stories,
            inner_headers: self.inner_headers,
            slowest: NonZero::new(self.slowest as u32),
            ..Resolver::new(kernel, access)
        };
        let mut failures = Failures::new(self.best_effort);
        let mut plans: Vec<SpanPlan> = Vec::new();
        for span in &self.spans {
            let resolved = resolver.span(span).and_then(|plan| check_distinct(&plans, plan));
            plans.extend(failures.unless_strict(&span.display_name(), resolved)?);
        }
        Ok((plans, failures))
    }

    /// What only spans between hooks need to know is only tried for them.
    fn access(&self) -> Access {
        let hooks = self.spans.iter().any(Span::has_hooks);
        Access {
            functions: hooks && driver::trials::has_functions(),
            types: hooks && !self.plain_tracepoints && driver::trials::has_typed_tracepoints(),
            headers: (self.identify
                || self.stories
                || self.filter.is_some()
                || self.spans.iter().any(Span::reads_headers))
                && driver::trials::has_kernel_reads(),
        }
    }

    fn bytes_of_rings(&self) -> usize {
        self.ring_bytes.unwrap_or_else(|| (4 << 20).max(driver::possible_cpus() * (128 << 10)))
    }

    /// Checks what can be checked without a kernel.
    fn validate(&self) -> Result<(), Error> {
        if self.spans.is_empty() {
            return Err(Error::config(
                "function",
                "nothing to measure: name a function with `function()`, or a span with `span()`",
            ));
        }
        for (n, span) in self.spans.iter().enumerate() {
            if let Some(complaint) = span.complaint() {
                return Err(Error::config("span", complaint));
            }
            let name = span.display_name();
            if self.spans[..n].iter().any(|other| other.display_name() == name) {
                return Err(Error::config(
                    "span",
                    format!("`{name}` is named twice: each span needs a name of its own"),
                ));
            }
        }
        for age in self.spans.iter().map(|span| span.max_age).chain([self.max_age]).flatten() {
            if age.is_zero() || age > LONGEST {
                return Err(Error::config(
                    "max_age",
                    format!("a maximal age of {age:?}: more than 0 and up to 292 years are possible"),
                ));
            }
        }
        if self.wait_for_modules > LONGEST {
            let reason = format!("waiting {:?} for modules: up to 292 years are possible", self.wait_for_modules);
            return Err(Error::config("wait_for_modules", reason));
        }
        for events in self.spans.iter().filter_map(|span| span.events).chain([self.events]) {
            events.check()?;
        }
        for span in &self.spans {
            in_range("max_groups", "groups", span.max_groups, &GROUPS)?;
        }
        in_range("keep_slowest", "of the slowest", self.slowest, &SLOWEST)?;
        if let Some(bytes) = self.ring_bytes {
            in_range("ring_bytes", "bytes", bytes, &RING_BYTES)?;
        }
        in_range("in_flight", "calls in flight", self.in_flight, &IN_FLIGHT)?;
        in_range("channel_capacity", "events in the channel", self.channel_capacity, &CHANNEL_CAPACITY)?;
        self.events_per_batch
            .map_or(Ok(()), |events| in_range("in_batches", "events in a batch", events, &EVENTS_PER_BATCH))
    }
}

/// What couldn't be attached.
struct Failures {
    best_effort: bool,
    failures: Vec<Failure>,
}

impl Failures {
    fn new(best_effort: bool) -> Self {
        Self { best_effort, failures: Vec::new() }
    }

    /// Keeps an error for later, if that is allowed.
    fn unless_strict<T>(&mut self, span: &str, result: Result<T, Error>) -> Result<Option<T>, Error> {
        match result {
            Err(error) if self.best_effort => {
                self.failures.push(Failure { span: Name::from(span), error });
                Ok(None)
            }
            other => other.map(Some),
        }
    }

    /// That would have to be loaded for more to work.
    fn missing_modules(&self) -> Vec<&str> {
        self.failures.iter().filter_map(|failure| failure.error.missing_module()).collect()
    }

    /// Where nothing was attached, the first error stands for all.
    fn unless_all(mut self, nothing: bool) -> Result<Vec<Failure>, Error> {
        if nothing && !self.failures.is_empty() {
            return Err(self.failures.swap_remove(0).error);
        }
        Ok(self.failures)
    }
}

/// What reading the records of these spans takes.
fn codec(kernel: &Kernel, plans: &[SpanPlan], typed: bool, symbols: Option<Arc<Symbolizer>>) -> Codec {
    let (mut spans, mut ends) = (Vec::new(), Vec::new());
    for (index, plan) in plans.iter().enumerate() {
        let place = Place { span: index, first_end: ends.len() };
        spans.push(SpanCodec { place, key: plan.key, doubted: plan.is_doubted() });
        let has_len = has_len(plan, typed);
        ends.extend(plan.body.ends().into_iter().map(|End { name, function, ret }| EndCodec {
            span: index,
            span_name: plan.name,
            key: plan.key,
            has_len,
            more: plan.more(),
            address: symbols.as_deref().filter(|_| plan.told).and_then(|symbols| address_of(symbols, function?)),
            name: Name::from(&*name),
            ret,
        }));
    }
    let drop_reasons = kernel.enumerators("skb_drop_reason").into_iter().map(|(code, name)| {
        let short = name.strip_prefix("SKB_DROP_REASON_").or_else(|| name.strip_prefix("SKB_")).unwrap_or(&name);
        (code, Name::from(short))
    });
    Codec { spans, ends, drop_reasons: drop_reasons.collect(), symbols }
}

fn address_of(symbols: &Symbolizer, function: &Function) -> Option<u64> {
    symbols.address_of(&function.name, function.module.as_deref())
}

/// Whether there may be events of packets that were dropped, with the address of who did it.
fn tells_who_drops(plan: &SpanPlan) -> bool {
    let tells = |hook: &HookPlan| matches!(hook.role, Role::Abandon { location_word: Some(_), .. });
    let hooks = match &plan.body {
        Body::Calls(_) => return false,
        Body::Hooks(hooks) => hooks,
    };
    plan.with_abandoned && plan.events.are_wanted() && hooks.iter().any(tells)
}

/// Whether the packet's length is read wherever the span starts.
fn has_len(plan: &SpanPlan, typed: bool) -> bool {
    match &plan.body {
        Body::Calls(_) => true,
        // With another key, the packet that it starts with may not be the one that it ends with.
        Body::Hooks(_) if !plan.key.is_packet() => false,
        Body::Hooks(hooks) => {
            let mut starts = hooks.iter().filter(|hook| hook.role == Role::Start);
            starts.all(|hook| hook.skb_word.is_some() && !hook.late && (typed || !hook.is_tracepoint()))
        }
    }
}

/// Refuses a span that is the same as an earlier one under another name (`ip_rcv`, `vmlinux:ip_rcv`).
fn check_distinct(plans: &[SpanPlan], plan: SpanPlan) -> Result<SpanPlan, Error> {
    let same = |other: &&SpanPlan| SpanPlan { name: other.name, ..plan.clone() } == **other;
    if let Some(first) = plans.iter().find(same) {
        let reason = format!("`{}` and `{}` are the same span: one is enough", first.name, plan.name);
        return Err(Error::config("span", reason));
    }
    Ok(plan)
}

fn in_range(setting: &'static str, what: &str, value: usize, range: &RangeInclusive<usize>) -> Result<(), Error> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::config(setting, format!("{value} {what}: {} to {} are possible", range.start(), range.end())))
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
        assert_eq!(reason, "nothing to measure: name a function with `function()`, or a span with `span()`");
    }

    /// What can't be a name is refused as such, not looked up.
    #[test]
    fn names() {
        let (setting, reason) = rejected(LatencyProbeBuilder::new().function("ip rcv"));
        assert_eq!(setting, "span");
        assert!(reason.contains("is not a function's name"), "{reason}");
    }

    /// Each span has a name of its own.
    #[test]
    fn no_name_twice() {
        let (_, reason) = rejected(builder().function("udp_sendmsg").function("ip_rcv"));
        assert_eq!(reason, "`ip_rcv` is named twice: each span needs a name of its own");
        let (_, reason) = rejected(builder().span(Span::function("udp_sendmsg").named("ip_rcv")));
        assert_eq!(reason, "`ip_rcv` is named twice: each span needs a name of its own");
    }

    /// No bound of zero, and none that no record could carry.
    #[test]
    fn ages() {
        for age in [Duration::ZERO, Duration::from_secs(1 << 40), Duration::MAX] {
            assert_eq!(rejected(builder().max_age(age)).0, "max_age");
            assert_eq!(rejected(builder().span(Span::function("x").max_age(age))).0, "max_age");
        }
    }

    /// Nobody waits longer than any clock can tell.
    #[test]
    fn waiting() {
        for time in [LONGEST + Duration::from_nanos(1), Duration::MAX] {
            assert_eq!(rejected(builder().wait_for_modules(time)).0, "wait_for_modules");
        }
    }

    /// Events come one way, not two.
    #[test]
    fn one_way() {
        let error = builder().in_batches(10).attach_with(|_| {}).expect_err("it must be refused");
        assert!(matches!(error.kind(), ErrorKind::Config { setting: "in_batches", .. }), "{error}");
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
        for events in [0, (1 << 16) + 1, usize::MAX] {
            assert_eq!(rejected(builder().in_batches(events)).0, "in_batches");
        }
        for count in [65, usize::MAX] {
            assert_eq!(rejected(builder().keep_slowest(count)).0, "keep_slowest");
        }
        for bytes in [0, (1 << 30) + 1, 1 << 31, u32::MAX as usize, usize::MAX] {
            assert_eq!(rejected(builder().ring_bytes(bytes)).0, "ring_bytes");
        }
        let (_, reason) = rejected(builder().in_flight(0));
        assert_eq!(reason, "0 calls in flight: 1 to 1048576 are possible");
    }
}
