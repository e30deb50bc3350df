//! The running probe.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use rustix::thread::{MembarrierCommand, membarrier};

use crate::batch::{self, Batches};
use crate::builder::LatencyProbeBuilder;
use crate::cost::{Cost, SpanCost};
use crate::decode::Codec;
use crate::driver::{AttachedSpan, Reader, Snapshot, SpanTally, Switch, Tally, kernel_memory, trials};
use crate::error::Error;
use crate::event::LatencyEvent;
use crate::events::Events;
use crate::group::{GroupBy, Groups};
use crate::histogram::Histogram;
use crate::ledger::{Ledger, SpanLedger};
use crate::memory::Memory;
use crate::name::Name;
use crate::pairing::{Pairing, Store};
use crate::plan::{Body, Role, SpanPlan};
use crate::slowest::Slowest;
use crate::span::Key;

/// Measures how long kernel functions take, as long as it lives.
///
/// Made by [`LatencyProbe::builder`]. It owns all that it needs, can be moved to another thread, and several can run
/// at once, in one process or in many, on the same functions or on others.
///
/// # Processes
///
/// However the process ends, the kernel detaches what is its own. A child that it makes by `fork()` has a copy, which
/// keeps the programs attached for as long as the child has it, beyond the parent's end. The child can drop it, or
/// [stop](Self::stop) it, which takes nothing from the parent's; it gets no events. A child that executes another program,
/// as [`Command`](std::process::Command)'s do, has nothing of it.
///
/// # Privileges
///
/// `CAP_BPF` and `CAP_PERFMON`, or root; [some things need more](crate#privileges).
///
/// # Kernel
///
/// Linux 5.10 or later with BTF, on an architecture with BPF trampolines (x86-64; arm64 from 6.4 on).
///
/// # Examples
///
/// ```no_run
/// use dwell::LatencyProbe;
///
/// let probe = LatencyProbe::builder().function("ip_rcv").attach()?;
/// for event in probe.events().iter().take(10) {
///     println!("{event}");
/// }
/// println!("{}", probe.stop());
/// # Ok::<(), dwell::Error>(())
/// ```
#[must_use = "a probe that is dropped is detached at once"]
pub struct LatencyProbe {
    infos: Vec<SpanInfo>,
    spans: Vec<AttachedSpan>,
    failures: Vec<Failure>,
    switch: Switch,
    codec: Arc<Codec>,
    reader: Option<Reader>,
    receivers: Receivers,
    memory: Memory,
    halted: bool,
    /// The id of the process that attached it.
    process: u32,
}

/// Where events can be received. Of these at most one is open.
pub(crate) struct Receivers {
    pub(crate) events: Receiver<LatencyEvent>,
    pub(crate) batches: Batches,
}

impl Receivers {
    /// None is open.
    pub(crate) fn closed() -> Self {
        Self { events: bounded(0).1, batches: batch::closed() }
    }

    /// The memory of all events that can wait in them.
    fn bytes(&self) -> u64 {
        // A place of a crossbeam channel has a word beside the event.
        let place = size_of::<LatencyEvent>() + size_of::<usize>();
        (self.events.capacity().unwrap_or(0) * place) as u64 + self.batches.bytes()
    }
}

/// What is known of an attached span.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanInfo {
    /// Its name.
    pub name: Name,
    /// What its ends are matched by.
    pub key: Key,
    /// Which of its latencies become events.
    pub events: Events,
    /// What its histograms are kept apart by.
    pub group_by: Option<GroupBy>,
    /// Where it starts: functions (each call's entry) or hooks, as [`Hook`](crate::Hook) is written.
    pub starts: Vec<String>,
    /// Where it ends; for calls the exits of the same functions.
    pub ends: Vec<String>,
    /// Where what the key stands for ends: what is met there is abandoned. Chosen by what this kernel has.
    pub releases: Vec<String>,
    /// How its ends are matched.
    pub pairing: Pairing,
    /// Where its starts wait for their ends. With [`Pairing::Session`] they only do if there are events, groups
    /// other than CPUs, or the slowest are kept; if not, [`in_flight`](LatencyProbeBuilder::in_flight) doesn't apply.
    pub store: Store,
    /// Whether tracepoints among its hooks are typed, so that a packet's length can be read. `true` if there are none.
    pub typed: bool,
    /// What is older than this has expired.
    pub max_age: Option<Duration>,
    /// Whether an address that is used again can't be taken for the packet or socket that had it before. `false` where
    /// functions can't be traced, since tracepoints alone don't see every packet go: see [`Key`].
    pub lives_are_seen: bool,
    with_abandoned: bool,
}

impl SpanInfo {
    pub(crate) fn new(plan: &SpanPlan, pairing: Pairing, store: Store, typed: bool) -> Self {
        let mut info = Self {
            name: plan.name,
            events: plan.events,
            group_by: plan.group_by,
            key: plan.key,
            starts: Vec::new(),
            ends: Vec::new(),
            releases: Vec::new(),
            pairing,
            store,
            typed: true,
            max_age: plan.max_age,
            lives_are_seen: plan.lives_are_seen,
            with_abandoned: plan.with_abandoned,
        };
        match &plan.body {
            Body::Calls(calls) => {
                for call in calls {
                    info.starts.push(call.function.to_string());
                    info.ends.push(format!("{}:exit", call.function));
                }
            }
            Body::Hooks(hooks) => {
                info.typed = typed || !hooks.iter().any(crate::plan::HookPlan::is_tracepoint);
                for hook in hooks {
                    let list = match hook.role {
                        Role::Start => &mut info.starts,
                        Role::End => &mut info.ends,
                        Role::Abandon { .. } => &mut info.releases,
                    };
                    list.push(hook.site.to_string());
                }
            }
        }
        info
    }
}

/// A span that couldn't be attached, see [`LatencyProbeBuilder::best_effort`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The span's name.
    pub span: Name,
    /// Why not.
    pub error: Error,
}

/// `SPAN: ERROR`
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.span, self.error)
    }
}

impl LatencyProbe {
    /// Begins to describe a probe.
    ///
    /// ```
    /// let builder = dwell::LatencyProbe::builder().function("ip_rcv").function("udp_sendmsg");
    /// # drop(builder);
    /// ```
    pub fn builder() -> LatencyProbeBuilder {
        LatencyProbeBuilder::new()
    }

    pub(crate) fn new(
        spans: Vec<(SpanInfo, AttachedSpan)>,
        failures: Vec<Failure>,
        switch: Switch,
        codec: Arc<Codec>,
        reader: Option<Reader>,
        receivers: Receivers,
    ) -> Self {
        let (infos, spans) = spans.into_iter().unzip();
        let spans: Vec<AttachedSpan> = spans;
        let (maps, programs) = kernel_memory(spans.iter());
        let memory = Memory { maps, programs, channel: receivers.bytes() };
        Self {
            infos,
            spans,
            failures,
            switch,
            codec,
            reader,
            receivers,
            memory,
            halted: false,
            process: std::process::id(),
        }
    }

    /// The events, one by one.
    ///
    /// Those of one CPU come in the order in which their spans ended there. Across CPUs the order is that only within some
    /// milliseconds: the reader goes from one to the next. [`LatencyEvent::end`] tells what came first.
    ///
    /// A bounded channel: while it is full, events are dropped and counted as
    /// [`channel_dropped`](SpanLedger::channel_dropped). Otherwise an event arrives within 100 ms of the span's end, and
    /// within some milliseconds mostly. (As long as the reader thread gets CPU time. Where the kernel preempts a program
    /// for longer, as the reader falls asleep, its event may take as long again, but a second at most.)
    ///
    /// While nothing comes, the probe wakes up about once a second, and more often in the first second. Without events
    /// it never does.
    ///
    /// Iterating blocks for the next event, and ends once the probe is stopped and all has been read; a clone of the
    /// receiver can be read on after [`stop`](Self::stop).
    ///
    /// It is empty and closed if events come [in batches](LatencyProbeBuilder::in_batches) or to a
    /// [callback](LatencyProbeBuilder::attach_with), and if no span wants events.
    pub fn events(&self) -> &Receiver<LatencyEvent> {
        &self.receivers.events
    }

    /// The events in batches, where [`in_batches`](LatencyProbeBuilder::in_batches) was asked for. Otherwise, and if no
    /// span wants events, it is empty and closed.
    ///
    /// What is said of [`events`](Self::events) goes for these, too. But it is no crossbeam receiver, and can't be used
    /// in `select!`.
    pub fn batches(&self) -> &Batches {
        &self.receivers.batches
    }

    /// The spans, in the order in which they were asked for.
    pub fn spans(&self) -> &[SpanInfo] {
        &self.infos
    }

    /// The spans that couldn't be attached, if [`best_effort`](LatencyProbeBuilder::best_effort) was asked for.
    pub fn failures(&self) -> &[Failure] {
        &self.failures
    }

    /// What has become of every call so far.
    ///
    /// While calls are running, the counters are read one after the other, and the sums may be off by the calls in
    /// between. The histograms are read as well, so it is also decided which pairs are
    /// [`doubtful`](SpanLedger::doubtful). For each span it takes a few system calls, two for each group, and, where
    /// the kernel has skipped programs since the last time, some milliseconds, on busy machines longer.
    pub fn ledger(&self) -> Ledger {
        // Without events nobody reads.
        let none = SpanTally::default();
        let tally = self.reader.as_ref().map(Reader::tally);
        let abandoned = self.reader.as_ref().is_some_and(Reader::is_abandoned);
        let accounts = self.infos.iter().zip(&self.spans).map(|(info, span)| {
            let tally = tally.map_or(&none, |tally| tally.span(span.index()));
            let Snapshot { counters, completed, doubtful, open, expired, missed, missed_exits, missed_releases } =
                span.snapshot();
            // What could become an event, and did; the programs only count those where it isn't all.
            let ended = completed + doubtful + if info.with_abandoned { counters.abandoned } else { 0 };
            let emitted = if info.events.are_all() { ended } else { counters.emitted };
            let not_emitted = ended.saturating_sub(emitted);
            let (below_threshold, unsampled) = match info.events {
                Events::OverThreshold(_) => (not_emitted, 0),
                _ => (0, not_emitted),
            };
            let (delivered, channel_dropped, withheld) =
                (tally.delivered.get(), tally.channel_dropped.get(), tally.withheld.get());
            // What nobody counts any more, since a callback holds the reader up.
            let handed_over = delivered + counters.ring_dropped + channel_dropped + withheld;
            let unread = if abandoned { emitted.saturating_sub(handed_over) } else { 0 };
            SpanLedger {
                span: info.name,
                started: counters.started,
                open_before: 0,
                completed,
                emitted,
                below_threshold,
                unsampled,
                delivered,
                ring_dropped: counters.ring_dropped,
                channel_dropped: channel_dropped + unread,
                withheld,
                abandoned: counters.abandoned,
                untracked: counters.untracked,
                overwritten: counters.overwritten,
                mismatched: counters.mismatched,
                doubtful,
                expired,
                open,
                unmatched: counters.unmatched,
                unkeyed: counters.unkeyed,
                unparsed: counters.unparsed,
                missed,
                missed_exits,
                missed_releases,
            }
        });
        Ledger { spans: accounts.collect(), undecodable: tally.map_or(0, Tally::undecodable) }
    }

    /// The latencies of a span so far, as the kernel has counted them: all that reached their end, events or not.
    ///
    /// A copy: nothing is reset, and counts only grow. For what came since an earlier one, see [`Histogram::since`]. While
    /// calls are running it is the state of one CPU after the other. Takes a few system calls, and two for each group;
    /// and some milliseconds, on busy machines longer, where the kernel has skipped programs since the last time. Then
    /// the uncertain pairs since that time are left out (see [`doubtful`](SpanLedger::doubtful)): the more often it is
    /// read, the fewer they are.
    ///
    /// ```no_run
    /// use dwell::{Events, LatencyProbe};
    ///
    /// let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach()?;
    /// std::thread::sleep(std::time::Duration::from_secs(10));
    /// println!("p99 {:?}", probe.histogram("ip_rcv")?.quantile(0.99));
    /// # Ok::<(), dwell::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) if no span has this name, [`System`](crate::ErrorKind::System) if the kernel has
    /// no memory to hand it over.
    pub fn histogram(&self, span: &str) -> Result<Histogram, Error> {
        let (_, span) = self.find(span)?;
        let reading = span.read()?;
        let mut total = Histogram::new();
        reading.groups.values().for_each(|histogram| total.merge(histogram));
        Ok(total)
    }

    /// The same, by groups, of a span that has them: see [`Span::grouped_by`](crate::Span::grouped_by).
    ///
    /// # Errors
    ///
    /// As for [`histogram`](Self::histogram); and [`Config`](crate::ErrorKind::Config) if the span isn't grouped.
    pub fn groups(&self, span: &str) -> Result<Groups, Error> {
        let (info, attached) = self.find(span)?;
        let by = info.group_by.ok_or_else(|| {
            Error::config("grouped_by", format!("`{span}` has no groups: `Span::grouped_by` makes them"))
        })?;
        Ok(Groups::new(by, &*attached.read()?))
    }

    /// The slowest of a span since this was asked for the last time, or since the probe was attached, of a probe that
    /// keeps them: see [`keep_slowest`](LatencyProbeBuilder::keep_slowest).
    ///
    /// They are those that ended in that time, and are kept anew from here on: what one caller gets, another doesn't. The
    /// histogram isn't touched.
    ///
    /// They are full events, whether or not they have been events, or been dropped as such. What isn't certain to be
    /// a latency is left out: see [`Slowest::withheld`]. Takes a system call for each CPU that there can be, and waits
    /// for the programs that run at this moment: some milliseconds, on busy machines longer.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) if no span has this name, or the probe keeps none;
    /// [`System`](crate::ErrorKind::System) if the kernel has no memory to hand them over. Then they are lost.
    pub fn slowest(&self, span: &str) -> Result<Slowest, Error> {
        let (_, attached) = self.find(span)?;
        attached.slowest(&self.codec).unwrap_or_else(|| {
            Err(Error::config(
                "keep_slowest",
                "the probe keeps none of the slowest: `LatencyProbeBuilder::keep_slowest` makes it",
            ))
        })
    }

    /// What the kernel says that the probe's programs have taken since they were attached, while it counted that: it
    /// does as long as anybody on the machine has a [`ProgramStatistics`](crate::ProgramStatistics), or the sysctl
    /// `kernel.bpf_stats_enabled` is on. Without, all is 0.
    ///
    /// To read it takes no more privileges than the probe. Calls that are paired by [`Pairing::Session`] have all in
    /// `starts`.
    pub fn cost(&self) -> Cost {
        let spans = self.infos.iter().zip(&self.spans).map(|(info, span)| {
            let [starts, ends, releases] = span.costs();
            SpanCost { span: info.name, starts, ends, releases }
        });
        Cost { spans: spans.collect() }
    }

    /// What the probe takes of the machine's memory. It is asked once, as the probe is attached, and stays the same.
    ///
    /// With the defaults a function takes some 4 MiB of the kernel's: 3 MiB are rings for the probe's events
    /// ([`ring_bytes`](LatencyProbeBuilder::ring_bytes)), and of each function, or span between hooks, up to 1.5 MiB are for
    /// what is [in flight](LatencyProbeBuilder::in_flight). Each CPU that there can be, online or not, adds at most 144 KiB
    /// for one span: 128 KiB of rings, which is nothing on fewer than 33 CPUs, and histograms, 11 KiB for each span. What
    /// is [grouped](crate::Span::max_groups), [identified](LatencyProbeBuilder::identify), or
    /// [kept](LatencyProbeBuilder::keep_slowest) comes on top.
    ///
    /// Of the kernel's memory there is 0 where `/proc` isn't mounted, which tells it. Not counted: a page for each
    /// function's trampoline, and what is shared by the process's probes, such as names of functions.
    ///
    /// While a probe attaches, this process takes some 15 MiB more for each of up to four threads.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Calibration: how long calls of a function that does nothing seem to take here, the probe's own part of each
    /// call's latency.
    ///
    /// Between the two time stamps of a call lie the end of the start program, the way through the kernel's trampoline to
    /// the function and back, and the beginning of the end program. That is in every latency of a call, whatever the
    /// function, so of short ones it is a large part: of a median latency, about the median of this is the probe's. (What
    /// the probe takes before its first time stamp and after its second lies outside.) It differs between machines, and
    /// grows where the processor guards against attacks on its speculation.
    ///
    /// Measured with a probe of its own on `bpf_fentry_test1`, which the kernel keeps for its tests and calls on request,
    /// 10,000 times; it takes some milliseconds beside attaching. Calls for which others ask meanwhile count, too.
    ///
    /// That probe has neither events nor groups. Programs for these may take a little more between the two time stamps.
    /// While there is a [`ProgramStatistics`](crate::ProgramStatistics), the kernel's own counting is in it as well, so
    /// it says too much.
    ///
    /// ```no_run
    /// use dwell::LatencyProbe;
    ///
    /// let own = LatencyProbe::empty_call()?;
    /// println!("of each latency the probe's part is {:?}", own.quantile(0.5));
    /// # Ok::<(), dwell::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for attaching to a function; [`System`](crate::ErrorKind::System) if the kernel doesn't call it.
    pub fn empty_call() -> Result<Histogram, Error> {
        const FUNCTION: &str = "bpf_fentry_test1";
        let probe = Self::builder().function(FUNCTION).events(Events::None).attach()?;
        trials::call_test_function(10_000)
            .map_err(|refusal| Error::system(refusal.action, refusal.errno).with_errno(refusal.errno))?;
        probe.histogram(FUNCTION)
    }

    fn find(&self, span: &str) -> Result<(&SpanInfo, &AttachedSpan), Error> {
        let found = self.infos.iter().zip(&self.spans).find(|(info, _)| info.name == span);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.infos.iter().map(|info| info.name.as_str()).collect();
            Error::config("span", format!("no span is named `{span}`: the spans are {}", names.join(", ")))
        })
    }

    /// Detaches, hands over the events that the kernel had written, closes the channel, and returns the last ledger.
    ///
    /// Doesn't wait for the channel, or the batches, to be read: what finds them full is dropped and counted as
    /// [`channel_dropped`](SpanLedger::channel_dropped). To read all that is left, clone the receiver first. With
    /// [`backpressure`](LatencyProbeBuilder::backpressure), and for a callback, it waits for up to half a second, and what is
    /// left then is dropped and counted.
    ///
    /// Whatever the program does, it returns within a second, with few functions mostly within some tens of milliseconds:
    /// detaching takes some for each.
    ///
    /// ```no_run
    /// # let probe = dwell::LatencyProbe::builder().function("ip_rcv").attach()?;
    /// let events = probe.events().clone();
    /// let ledger = probe.stop();
    /// assert!(ledger.is_balanced());
    /// for event in events {
    ///     println!("{event}");
    /// }
    /// # Ok::<(), dwell::Error>(())
    /// ```
    pub fn stop(mut self) -> Ledger {
        self.halt();
        self.ledger()
    }

    fn halt(&mut self) {
        if std::mem::replace(&mut self.halted, true) {
            return;
        }
        // The copy that a forked child has: the switch and the reader are its parent's.
        if std::process::id() != self.process {
            if let Some(reader) = &mut self.reader {
                reader.disown();
            }
            self.spans.iter_mut().for_each(AttachedSpan::detach);
            return;
        }
        // What is believed by now stays so: skips from here on, of which the programs see less, don't put it in doubt.
        for span in &self.spans {
            let _ = span.read();
        }
        // The hooks go one by one, which takes a while; what is left of them must not see half of what happens. A program
        // that runs on another CPU at this moment may have seen the switch on. Programs run in RCU read-side sections,
        // and this waits for all of those to end.
        self.switch.off();
        let _ = membarrier(MembarrierCommand::Global);
        self.spans.iter_mut().for_each(AttachedSpan::detach);
        // The exits of calls count until they are gone, and one may be about to write its record. Where waiting isn't
        // allowed (seccomp) or can't be (nohz_full CPUs), such a record may stay unread, and its call counts as completed
        // but not as delivered.
        let _ = membarrier(MembarrierCommand::Global);
        if let Some(reader) = &mut self.reader {
            reader.stop();
        }
    }
}

/// Detaches, as [`LatencyProbe::stop`] does.
impl Drop for LatencyProbe {
    fn drop(&mut self) {
        self.halt();
    }
}

impl fmt::Debug for LatencyProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LatencyProbe").field("spans", &self.infos).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe can be kept in any struct and moved to any thread.
    #[test]
    fn travels() {
        fn is<T: Send + Sync + fmt::Debug + 'static>() {}
        is::<LatencyProbe>();
        is::<Receiver<LatencyEvent>>();
    }
}
