//! What the kernel keeps of a span, and how it is read.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libbpf_rs::{ErrorExt as _, MapCore as _, MapFlags, MapHandle, libbpf_sys};

use super::memory::bytes_of;
use super::{EMFILE, FIRST_KEY};
use crate::cost::ProgramCost;
use crate::event::MonotonicTime;
use crate::plan::Role;
use crate::wire::{Counters, Start, State, Summary};

/// A million entries at once would keep the reader from its ring for a second.
const SWEPT_AT_ONCE: usize = 8_192;

/// The maps in which a span's starts wait for their ends: one pair for each function, or for all of a span's hooks.
#[derive(Debug)]
pub(super) struct StateMaps {
    state: MapHandle,
    overflow: MapHandle,
    doubt: MapHandle,
    /// Where the packets of those in the table are, if that is kept.
    identities: Option<MapHandle>,
    max_age: Option<Duration>,
    /// Expired entries that `sweep` took out of the overflow map. The programs' count of entries keeps them.
    swept: AtomicU64,
    /// The bytes of `struct dwell_state` as last read.
    last: Mutex<Vec<u8>>,
}

impl StateMaps {
    /// Keeps maps of a loaded object.
    pub(super) fn keep<'m, M>(
        state: &'m M,
        overflow: &'m M,
        doubt: &'m M,
        identities: Option<&'m M>,
        max_age: Option<Duration>,
    ) -> libbpf_rs::Result<Self>
    where
        MapHandle: TryFrom<&'m M, Error = libbpf_rs::Error>,
    {
        let state = MapHandle::try_from(state)?;
        let last = Mutex::new(vec![0; state.value_size() as usize]);
        let (overflow, doubt) = (MapHandle::try_from(overflow)?, MapHandle::try_from(doubt)?);
        let identities = identities.map(MapHandle::try_from).transpose()?;
        Ok(Self { state, overflow, doubt, identities, max_age, swept: AtomicU64::new(0), last })
    }

    /// The maps, for one more object of the same span.
    pub(super) fn handles(&self) -> [&MapHandle; 3] {
        [&self.state, &self.overflow, &self.doubt]
    }

    pub(super) fn identities(&self) -> Option<&MapHandle> {
        self.identities.as_ref()
    }

    /// Uncertain pairs that began before this aren't to be counted.
    pub(super) fn doubt_before(&self, time: MonotonicTime) -> libbpf_rs::Result<()> {
        self.doubt.update(&FIRST_KEY, &time.as_nanos().to_ne_bytes(), MapFlags::ANY)
    }

    /// Starts before this have expired.
    fn oldest(&self) -> u64 {
        let age = self.max_age.map_or(u64::MAX, |age| age.as_nanos() as u64);
        MonotonicTime::now().as_nanos().saturating_sub(age)
    }

    /// What has been counted so far.
    ///
    /// Should the kernel have no memory to hand its counters over, they are those of the last time.
    fn summary(&self) -> Summary {
        let mut bytes = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked first, so that what is swept meanwhile isn't counted twice.
        let swept = self.swept.load(Ordering::Relaxed);
        let _ = self.state.lookup_into(&FIRST_KEY, &mut bytes, MapFlags::ANY);
        let mut summary = State::summary(&bytes, self.oldest()).unwrap_or_default();
        // It is raised before an entry is there, and lowered after it has gone.
        summary.overflow = summary.overflow.saturating_sub(swept);
        summary.expired += swept;
        summary.swept = swept;
        summary
    }

    /// Takes what has expired out of the overflow map, so that it doesn't fill up with starts that never end. (In the
    /// table, a start between hooks that needs room takes that of one that has expired.) Looks at [`SWEPT_AT_ONCE`]
    /// entries at most.
    ///
    /// The programs' count of entries keeps what was swept: it is only there to spare them a look into an empty map.
    pub(super) fn sweep(&self) {
        if self.max_age.is_none() {
            return;
        }
        let oldest = self.oldest();
        // Collected first: the kernel begins anew when it is asked for what follows a key that is gone.
        let keys: Vec<_> = self.overflow.keys().take(SWEPT_AT_ONCE).collect();
        for key in keys {
            let Ok(Some(start)) = self.overflow.lookup(&key, MapFlags::ANY) else { continue };
            // 0 is one that is being written. Should another start take its place right here, then that one goes; the
            // program has counted this one, so the sums hold.
            let expired = Start::time(&start).is_some_and(|ns| ns != 0 && ns < oldest);
            if expired && self.overflow.delete(&key).is_ok() {
                self.swept.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// What the kernel has counted of a span, and what waits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    pub(super) counters: Counters,
    pub(super) open: u64,
    /// Starts that have expired and were never met again,
    pub(super) expired: u64,
    /// and those among them that were taken away.
    pub(super) swept: u64,
}

impl Counted {
    pub(super) fn of<'a>(maps: impl IntoIterator<Item = &'a StateMaps>) -> Self {
        maps.into_iter().fold(Self::default(), |sum, maps| {
            let summary = maps.summary();
            Self {
                counters: sum.counters.plus(summary.counters),
                open: sum.open + summary.waiting + summary.overflow,
                expired: sum.expired + summary.expired,
                swept: sum.swept + summary.swept,
            }
        })
    }
}

/// How often the kernel has skipped a span's programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) starts: u64,
    pub(crate) ends: u64,
    pub(crate) releases: u64,
}

/// The programs of a probe's spans, by the spans' indices.
#[derive(Debug, Default)]
pub(super) struct Programs(Mutex<BTreeMap<usize, Vec<Program>>>);

/// A program that was loaded.
#[derive(Debug)]
struct Program {
    role: Role,
    fd: OwnedFd,
}

impl Programs {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Program>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before its first run, so that the reader never misses a skipped one.
    pub(super) fn add(&self, span: usize, role: Role, program: &impl AsFd) -> libbpf_rs::Result<()> {
        let fd = program.as_fd().try_clone_to_owned().map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(EMFILE);
            libbpf_rs::Error::from_raw_os_error(errno).context("duplicating a descriptor")
        })?;
        self.lock().entry(span).or_default().push(Program { role, fd });
        Ok(())
    }

    /// Of a span that wasn't attached after all.
    pub(super) fn remove(&self, span: usize) {
        self.lock().remove(&span);
    }

    /// How often the kernel has skipped those of a span's programs that make a pair doubtful: of calls the starts, else
    /// any. Sessions, which have no programs for ends, have no doubtful pairs.
    pub(super) fn skipped_in_doubt(&self, span: usize, calls: bool) -> u64 {
        let programs = self.lock();
        if !programs.get(&span).is_some_and(|programs| programs.iter().any(|program| program.role == Role::End)) {
            return 0;
        }
        let counted = |program: &&Program| !calls || program.role == Role::Start;
        let programs = programs.get(&span).into_iter().flatten().filter(counted);
        programs.map(|program| recursion_misses(program.fd.as_fd())).sum()
    }

    /// What the kernel has counted of the runs of a span's programs: of starts, ends and releases.
    pub(super) fn costs(&self, span: usize) -> [ProgramCost; 3] {
        let mut costs = [ProgramCost::default(); 3];
        for Program { role, fd } in self.lock().get(&span).into_iter().flatten() {
            let info = info(fd.as_fd());
            let cost = match role {
                Role::Start => &mut costs[0],
                Role::End => &mut costs[1],
                Role::Abandon { .. } => &mut costs[2],
            };
            cost.runs += info.run_cnt;
            cost.time += Duration::from_nanos(info.run_time_ns);
        }
        costs
    }

    /// What a span's programs take of the kernel's memory: as they were verified, and as the CPU runs them.
    pub(super) fn bytes(&self, span: usize) -> u64 {
        let programs = self.lock();
        let programs = programs.get(&span).into_iter().flatten();
        programs.map(|Program { fd, .. }| bytes_of(fd) + u64::from(info(fd.as_fd()).jited_prog_len)).sum()
    }

    /// How often the kernel has skipped a span's programs.
    pub(super) fn skipped(&self, span: usize) -> Skipped {
        let mut skipped = Skipped::default();
        for Program { role, fd } in self.lock().get(&span).into_iter().flatten() {
            let count = match role {
                Role::Start => &mut skipped.starts,
                Role::End => &mut skipped.ends,
                Role::Abandon { .. } => &mut skipped.releases,
            };
            *count += recursion_misses(fd.as_fd());
        }
        skipped
    }
}

/// How often the kernel has skipped a program because it was running already; 0 on kernels before 5.12, which never
/// skip.
fn recursion_misses(prog: BorrowedFd<'_>) -> u64 {
    info(prog).recursion_misses
}

/// What the kernel says of a program; zeroes if it doesn't.
#[expect(unsafe_code, reason = "libbpf-rs offers this only for programs found by iterating over all of them")]
fn info(prog: BorrowedFd<'_>) -> libbpf_sys::bpf_prog_info {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    // SAFETY: `info` is a valid, zeroed `bpf_prog_info` of `len` bytes that the kernel may write to, and its pointer
    // members are NULL with their lengths 0, so that the kernel writes nowhere else.
    let result =
        unsafe { libbpf_sys::bpf_obj_get_info_by_fd(prog.as_raw_fd(), (&raw mut info).cast::<c_void>(), &raw mut len) };
    if result == 0 { info } else { libbpf_sys::bpf_prog_info::default() }
}

/// Has the kernel count runs and times of all programs, until what it returns is closed.
#[expect(unsafe_code, reason = "libbpf-rs doesn't offer this")]
pub(super) fn enable_statistics() -> Result<OwnedFd, i32> {
    // SAFETY: takes no pointer.
    let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    if fd < 0 {
        return Err(-fd);
    }
    // SAFETY: a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
