//! Attached spans, and what the kernel's refusals mean.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libbpf_rs::{Link, OpenProgramMut};

use super::latencies::{Latencies, Reading};
use super::memory::MapBytes;
use super::messages::{Rejection, last_lines};
use super::object::Context;
use super::room::Room;
use super::slowest::Keeper;
use super::state::{Counted, Programs, StateMaps};
use super::{
    E2BIG, EBUSY, EMFILE, ENFILE, ENODEV, ENOMEM, EPERM, ESRCH, Shared, call, errno, hook, messages, refusal,
    system_error, trials,
};
use crate::cost::ProgramCost;
use crate::decode::{Codec, Place};
use crate::error::{Capability, ENOTSUPP, Error, ErrorKind, NotTraceable};
use crate::histogram::Histogram;
use crate::kernel;
use crate::pairing::Pairing;
use crate::plan::{Body, CallPlan, Site, SpanPlan};
use crate::slowest::Slowest;
use crate::wire::Counters;

/// An attached span. Dropping it detaches it.
#[derive(Debug)]
pub(crate) struct AttachedSpan {
    links: Vec<Link>,
    maps: Vec<Arc<StateMaps>>,
    latencies: Latencies,
    keeper: Option<Keeper>,
    /// What was read of `latencies` last.
    last: Mutex<Arc<Reading>>,
    programs: Arc<Programs>,
    map_bytes: MapBytes,
    pairing: Pairing,
    index: usize,
}

/// What the kernel has counted of a span.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Snapshot {
    pub(crate) counters: Counters,
    /// Pairs that are believed,
    pub(crate) completed: u64,
    /// and those that aren't.
    pub(crate) doubtful: u64,
    pub(crate) open: u64,
    /// Starts that were too old, whether they were met again or not.
    pub(crate) expired: u64,
    /// Starts, ends and releases that the kernel kept from the probe.
    pub(crate) missed: u64,
    pub(crate) missed_exits: u64,
    pub(crate) missed_releases: u64,
}

/// What loading and attaching a part of a span came to.
pub(super) struct Part {
    pub(super) links: Vec<Link>,
    pub(super) maps: StateMaps,
    pub(super) map_bytes: MapBytes,
}

/// The most threads that attach at once. Each has a copy of the kernel's type information, some 15 MiB.
const THREADS: usize = 4;

/// Loads and attaches these spans, several at once, since loading is all that takes long; gives their results in the
/// same order. After a failure for which `goes_on` is not set none is begun any more, so results may be fewer.
pub(crate) fn attach_all(
    shared: &Shared,
    spans: &[(Place, &SpanPlan)],
    in_flight: u32,
    goes_on: bool,
) -> Vec<Result<AttachedSpan, Error>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Vec<OnceLock<_>> = spans.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        while goes_on || !failed.load(Ordering::Relaxed) {
            // Taken in their order, so that all before one that fails have been begun.
            let n = next.fetch_add(1, Ordering::Relaxed);
            let (Some((place, plan)), Some(result)) = (spans.get(n), results.get(n)) else { break };
            let attached = attach(shared, *place, plan, in_flight);
            failed.fetch_or(attached.is_err(), Ordering::Relaxed);
            let _ = result.set(attached);
        }
    };
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 1..cpus.min(THREADS).min(spans.len()) {
            // Where there can't be more threads, this one does it alone.
            let _ = std::thread::Builder::new().name("dwell-attach".into()).spawn_scoped(scope, work);
        }
        work();
    });
    results.into_iter().map_while(OnceLock::into_inner).collect()
}

/// Loads and attaches a span; on failure nothing of it is left.
fn attach(shared: &Shared, place: Place, plan: &SpanPlan, in_flight: u32) -> Result<AttachedSpan, Error> {
    let room = Room::new(in_flight, shared.store);
    let attach_as = |pairing| attach_as(shared, place, plan, &room, pairing);
    if let Body::Hooks(_) = plan.body {
        return attach_as(Pairing::Key);
    }
    // A function may have no cookie left, or another reason; what counts is what the other way has to say.
    let session = shared.sessions.then(|| attach_as(Pairing::Session));
    match session {
        Some(Ok(span)) => Ok(span),
        _ => attach_as(Pairing::Frame),
    }
}

fn attach_as(
    shared: &Shared,
    place: Place,
    plan: &SpanPlan,
    room: &Room,
    pairing: Pairing,
) -> Result<AttachedSpan, Error> {
    let has_uncertain = pairing != Pairing::Session;
    let (latencies, _) = messages::captured(|| Latencies::create(has_uncertain, plan.group_by, plan.max_groups));
    let latencies = latencies.map_err(|error| not_created("creating the histograms", &error))?;
    let (keeper, _) = messages::captured(|| Keeper::create(plan));
    let keeper = keeper.map_err(|error| not_created("creating room for the slowest spans", &error))?;
    let context = Context { shared, place, plan, room, latencies: &latencies, keeper: keeper.as_ref() };
    let parts: Result<Vec<Part>, Error> = match &plan.body {
        Body::Calls(calls) => {
            let attach = |(part, call): (usize, &CallPlan)| call::attach(&context, part, call, pairing);
            calls.iter().enumerate().map(attach).collect()
        }
        Body::Hooks(hooks) => hook::attach(&context, hooks).map(|part| vec![part]),
    };
    let parts = parts.inspect_err(|_| shared.programs.remove(place.span))?;
    let mut span = AttachedSpan {
        links: Vec::new(),
        maps: vec![],
        latencies,
        keeper,
        last: Mutex::default(),
        programs: Arc::clone(&shared.programs),
        map_bytes: MapBytes::new(),
        pairing,
        index: place.span,
    };
    for Part { links, maps, map_bytes } in parts {
        let maps = Arc::new(maps);
        shared.watch(&maps);
        span.map_bytes.extend(map_bytes);
        span.links.extend(links);
        span.maps.push(maps);
    }
    Ok(span)
}

/// What it means that a map couldn't be created.
fn not_created(action: &str, error: &libbpf_rs::Error) -> Error {
    refusal(errno(error)).unwrap_or_else(|| system_error(action, error))
}

impl AttachedSpan {
    /// Detaches; what has been counted can still be read.
    pub(crate) fn detach(&mut self) {
        self.links.clear();
    }

    /// Its number in the probe.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// What its maps take of the kernel's memory, by their ids.
    pub(super) fn map_bytes(&self) -> &MapBytes {
        &self.map_bytes
    }

    /// And its programs.
    pub(super) fn program_bytes(&self) -> u64 {
        self.programs.bytes(self.index)
    }

    /// How its ends are matched, as it turned out.
    pub(crate) fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// What its starts, ends and releases have taken, if the kernel counts that.
    pub(crate) fn costs(&self) -> [ProgramCost; 3] {
        self.programs.costs(self.index)
    }

    /// The slowest since the last time, as far as they are kept.
    pub(crate) fn slowest(&self, codec: &Codec) -> Option<Result<Slowest, Error>> {
        let skipped = || self.programs.skipped_in_doubt(self.index, self.pairing != Pairing::Key);
        self.keeper.as_ref().map(|keeper| keeper.take(codec, self.index, skipped))
    }

    /// The histograms so far.
    pub(crate) fn read(&self) -> Result<Arc<Reading>, Error> {
        // Without events there is no thread that does it.
        self.maps.iter().for_each(|maps| maps.sweep());
        let calls = self.pairing != Pairing::Key;
        let reading = self
            .latencies
            .read(&self.maps, self.pairing == Pairing::Frame, || self.programs.skipped_in_doubt(self.index, calls))?;
        let reading = Arc::new(reading);
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&reading);
        Ok(reading)
    }

    /// What the kernel has counted so far. Should it have no memory to hand that over, it is that of the last time.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let reading =
            self.read().unwrap_or_else(|_| Arc::clone(&self.last.lock().unwrap_or_else(PoisonError::into_inner)));
        let Counted { counters, open, expired, .. } = Counted::of(self.maps.iter().map(Arc::as_ref));
        let skipped = self.programs.skipped(self.index);
        let mut snapshot = Snapshot {
            counters,
            completed: reading.groups.values().map(Histogram::count).sum(),
            doubtful: reading.doubtful,
            open,
            expired: counters.expired + expired,
            missed: skipped.starts,
            missed_exits: skipped.ends,
            missed_releases: skipped.releases,
        };
        if self.pairing == Pairing::Session {
            snapshot.of_session();
        }
        snapshot
    }
}

impl Snapshot {
    /// One program sees both ends of a call, and the kernel has one count of its skipped runs; nor does a started call
    /// wait anywhere. But the program knows of each end whether its start was seen, and all calls end, so that at rest:
    ///
    /// - skipped = skipped starts + skipped ends
    /// - calls = started + skipped starts = ends seen + skipped ends
    fn of_session(&mut self) {
        let Self { counters, completed, expired, .. } = *self;
        // Others haven't met their end, or have, and it is among the `unseen`.
        let met = completed + counters.mismatched + counters.expired;
        let lost = counters.overwritten + counters.untracked + (expired - counters.expired);
        let skipped = self.missed;
        // Calls that run at this moment look as if their ends had been skipped; without any skipped, nothing was.
        let starts = (skipped + met + counters.unseen).saturating_sub(counters.started) / 2;
        self.missed = starts.min(skipped);
        self.missed_exits = skipped - self.missed;
        self.open = counters.started.saturating_sub(met + lost);
    }
}

/// Where loading and attaching got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Load,
    Attach,
}

#[derive(Debug)]
pub(super) struct Failure {
    pub(super) step: Step,
    pub(super) error: libbpf_rs::Error,
}

/// To say of a result how far it got.
pub(super) fn at(step: Step) -> impl Fn(libbpf_rs::Error) -> Failure {
    move |error| Failure { step, error }
}

/// Loads a program of an object, for this target, or leaves it out.
pub(super) fn choose(prog: &mut OpenProgramMut<'_>, target: Option<&str>) -> libbpf_rs::Result<()> {
    prog.set_autoload(target.is_some());
    match target {
        Some(target) => prog.set_attach_target(0, Some(target.to_owned())),
        None => Ok(()),
    }
}

/// Does what may fail, and makes an error of what the kernel and libbpf have to say to it.
pub(super) fn explained<T>(site: &Site, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Error> {
    let (result, log) = messages::captured(work);
    result.map_err(|failure| explain(&failure, site, log))
}

/// Arguments that every kernel's trampolines can save.
const CERTAIN_WORDS: u32 = 6;

/// Makes of the kernel's errno what it means for this function or tracepoint.
pub(super) fn explain(failure: &Failure, site: &Site, log: Vec<String>) -> Error {
    let errno = errno(&failure.error);
    let (function, in_module, site) = (site.function(), site.module().is_some(), &*site.to_string());
    let words = function.map_or(0, |function| function.signature.words());
    let lacks_admin = in_module && kernel::lacks(Capability::SysAdmin);
    let rejection = || {
        let Rejection { program, verdict, log } = Rejection::find(&log).filter(|_| failure.step == Step::Load)?;
        Some(ErrorKind::Rejected { hook: site.to_owned(), program, errno, verdict, log }.into())
    };
    let known = || function.and_then(|function| kernel::why_not_attached(function.module.as_deref(), &function.name));
    let error: Error = match errno {
        // Where there are no trampolines the errno is the same as where they can't save so many registers, and, on arm64,
        // as for a function that ftrace doesn't have.
        ENOTSUPP if words > CERTAIN_WORDS && !trials::lacks_trampolines() => {
            Error::not_traceable(site, known().unwrap_or(NotTraceable::TooManyArguments { words }))
        }
        // A module's type information is a kernel object, and to open one takes CAP_SYS_ADMIN.
        EPERM | ESRCH if lacks_admin => {
            Error::no_privilege("tracing functions and tracepoints of modules", vec![Capability::SysAdmin])
        }
        EPERM | ENOTSUPP if function.is_none() => refusal(errno)
            .or_else(rejection)
            .unwrap_or_else(|| system_error(&format!("attaching to `{site}`"), &failure.error)),
        EPERM | ENOTSUPP if errno == EPERM || !trials::has_functions() => refusal(errno)
            .or_else(rejection)
            .unwrap_or_else(|| ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() }.into()),
        E2BIG if failure.step == Step::Attach => Error::not_traceable(site, NotTraceable::TooManyProbes),
        ENOMEM | ENFILE | EMFILE => {
            refusal(errno).unwrap_or_else(|| system_error(&format!("attaching to `{site}`"), &failure.error))
        }
        _ => {
            let tracer = || function.filter(|_| [EBUSY, ENODEV].contains(&errno)).and(kernel::why_no_tracer());
            let known = tracer().or_else(known).map(|reason| Error::not_traceable(site, reason));
            known
                .or_else(rejection)
                .unwrap_or_else(|| Error::not_traceable(site, NotTraceable::Refused { errno, log: last_lines(&log) }))
        }
    };
    error.with_errno(errno)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::EINVAL;
    use crate::kernel::{Function, Param, Return, Signature};

    /// In no kernel's symbols, so that these have no say.
    const NAME: &str = "no_such_function";

    fn explained(step: Step, errno: i32, words: usize) -> ErrorKind {
        let param = Param { name: String::new(), ty: "int".into(), words: 1, points_to: None };
        let function = Function {
            name: NAME.into(),
            module: None,
            signature: Signature {
                params: vec![param; words],
                ret: Return::Void,
                ret_points_to: None,
                variadic: false,
            },
        };
        let site = Site::Entry(function);
        let failure = Failure { step, error: libbpf_rs::Error::from_raw_os_error(errno) };
        let log = (0..30).map(|n| format!("line {n}")).collect();
        let error = explain(&failure, &site, log);
        assert!(std::error::Error::source(&error).is_some(), "{error}");
        error.kind().clone()
    }

    fn reason(step: Step, errno: i32, words: usize) -> NotTraceable {
        match explained(step, errno, words) {
            ErrorKind::NotTraceable { function, reason } => {
                assert_eq!(function, NAME);
                reason
            }
            other => panic!("{other:?}"),
        }
    }

    /// What the kernel's errno means, where a kernel that answers so may not be at hand.
    #[test]
    fn explains_errnos() {
        let refused = |errno| ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() };
        for step in [Step::Load, Step::Attach] {
            assert_eq!(explained(step, EPERM, 4), refused(EPERM));
        }
        // Where other functions can be traced, it is for this one.
        assert_eq!(explained(Step::Attach, ENOTSUPP, 4) == refused(ENOTSUPP), !trials::has_functions());
        // Where the kernel's symbols can be read, the function isn't among them.
        let eight = reason(Step::Attach, ENOTSUPP, 8);
        assert!([NotTraceable::TooManyArguments { words: 8 }, NotTraceable::Inlined].contains(&eight), "{eight}");
        assert_eq!(reason(Step::Attach, E2BIG, 4), NotTraceable::TooManyProbes);
        for errno in [ENOMEM, ENFILE, EMFILE] {
            let action = format!("attaching to `{NAME}`");
            assert_eq!(explained(Step::Load, errno, 4), ErrorKind::System { action, errno });
        }
        let reason = reason(Step::Load, EINVAL, 4);
        match reason {
            NotTraceable::Inlined => {}
            NotTraceable::Refused { errno, log } => assert_eq!((errno, log.len(), &*log[19]), (EINVAL, 20, "line 29")),
            other => panic!("{other:?}"),
        }
    }
}
