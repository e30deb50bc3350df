//! One span: an object of its own, specialised, loaded, attached, and then reduced to its links and maps.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{ErrorExt as _, Link, MapCore as _, MapFlags, MapHandle, OpenProgramMut, ProgramMut, libbpf_sys};

use super::trials::{self, Refusal};
use super::{ENOMEM, EPERM, FIRST_KEY, Shared, errno, messages, refusal, system_error};
use crate::error::{Capability, ENOTSUPP, Error, ErrorKind, NotTraceable};
use crate::kernel::{self, Function, Return};
use crate::pairing::Store;
use crate::wire::{Counters, SETS, State, WAYS};

#[cfg(not(dwell_docs))]
#[allow(warnings, unsafe_code, clippy::all, clippy::restriction, reason = "generated code")]
mod skel {
    pub(super) mod dwell {
        include!(concat!(env!("OUT_DIR"), "/dwell.skel.rs"));
    }
}

#[cfg(not(dwell_docs))]
pub(super) use skel::dwell::types;

/// An attached span. Dropping it detaches it.
#[derive(Debug)]
pub(crate) struct AttachedSpan {
    links: Option<Links>,
    state: MapHandle,
    /// The bytes of `struct dwell_state` as last read.
    last: Mutex<Vec<u8>>,
    programs: Arc<Programs>,
    index: usize,
}

/// The programs of a probe's spans, entry and exit, in the spans' order.
#[derive(Debug, Default)]
pub(super) struct Programs(Mutex<Vec<(OwnedFd, OwnedFd)>>);

impl Programs {
    fn lock(&self) -> MutexGuard<'_, Vec<(OwnedFd, OwnedFd)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often the kernel has skipped a span's entry program.
    pub(super) fn skipped_entries(&self, span: usize) -> u64 {
        self.lock().get(span).map_or(0, |(entry, _)| recursion_misses(entry.as_fd()))
    }

    /// How often the kernel has skipped a span's programs.
    fn skipped(&self, span: usize) -> Skipped {
        self.lock().get(span).map_or_else(Skipped::default, |(entry, exit)| Skipped {
            entries: recursion_misses(entry.as_fd()),
            exits: recursion_misses(exit.as_fd()),
        })
    }
}

/// Dropped exit first: detaching makes the kernel cut calls in flight off from their exits, and an exit program that
/// outlived the entry program would take the starts that they leave behind for those of later calls, whose entries
/// nobody sees or counts.
#[derive(Debug)]
struct Links {
    _exit: Link,
    _entry: Link,
}

/// How often the kernel has skipped a span's programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Skipped {
    pub(crate) entries: u64,
    pub(crate) exits: u64,
}

/// What the kernel has counted of a span.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Snapshot {
    pub(crate) counters: Counters,
    pub(crate) open: u64,
    pub(crate) skipped: Skipped,
}

/// A function, and what loading a span for it takes to know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Without the module's name.
    pub(crate) function: String,
    /// `None`: in the kernel itself.
    pub(crate) module: Option<String>,
    /// 64-bit words of the fentry context that the arguments take.
    pub(crate) arg_words: u32,
    /// The word that is a `struct sk_buff *`.
    pub(crate) skb_word: Option<u32>,
    pub(crate) ret: Return,
}

impl From<Function> for Target {
    fn from(function: Function) -> Self {
        let Function { name, module, signature } = function;
        let skb = signature.params.iter().position(|param| param.points_to.as_deref() == Some("sk_buff"));
        Self {
            function: name,
            module,
            arg_words: signature.words(),
            skb_word: skb.map(|param| signature.word_of(param)),
            ret: signature.ret,
        }
    }
}

/// Loads and attaches the span number `index`, for calls of `target`; on failure nothing of it is left.
///
/// `name` is what the user calls it.
pub(crate) fn attach(
    shared: &Shared,
    index: u32,
    name: &str,
    target: &Target,
    in_flight: u32,
) -> Result<AttachedSpan, Error> {
    let room = Room::new(in_flight, shared.store);
    let (result, log) = messages::captured(|| load_and_attach(shared, index, target, &room));
    result.map_err(|failure| explain(failure, name, target, log))
}

/// How a span's in-flight calls are stored.
struct Room {
    store: Store,
    /// log2 of the sets of the table that are used.
    log2_sets: u32,
    /// Entries of the overflow map, or of the hash map that stands for all.
    overflow: u32,
}

impl Room {
    /// Half of the calls in the table, as far as it goes, the rest in the map behind it. A set of the table can be
    /// full while others are empty, so the map is what guarantees the number.
    fn new(in_flight: u32, store: Store) -> Self {
        match store {
            Store::HashMap => Self { store, log2_sets: 0, overflow: in_flight },
            Store::Table => {
                let sets = (in_flight / 2 / WAYS as u32).clamp(1, SETS as u32);
                let log2_sets = sets.ilog2();
                let table = (WAYS as u32) << log2_sets;
                Self { store, log2_sets, overflow: in_flight.saturating_sub(table).max(1) }
            }
        }
    }
}

/// The table, if this kernel has compare-and-swap for it; found by trying, once for the process.
pub(crate) fn choose_store() -> Result<Store, Error> {
    static CHOICE: OnceLock<Store> = OnceLock::new();
    if let Some(&store) = CHOICE.get() {
        return Ok(store);
    }
    let store = match trials::atomics() {
        Ok(()) => Store::Table,
        Err(Refusal { errno: EINVAL, .. }) => Store::HashMap,
        Err(Refusal { action, errno }) => {
            return Err(refusal(errno).unwrap_or_else(|| Error::system(action, errno).with_errno(errno)));
        }
    };
    Ok(*CHOICE.get_or_init(|| store))
}

/// Where loading and attaching a span got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Load,
    Attach,
}

struct Failure {
    stage: Stage,
    error: libbpf_rs::Error,
}

fn load_and_attach(shared: &Shared, index: u32, target: &Target, room: &Room) -> Result<AttachedSpan, Failure> {
    let at = |stage| move |error| Failure { stage, error };
    let mut object = MaybeUninit::uninit();
    let mut open = skel::dwell::DwellSkelBuilder::default().open(&mut object).map_err(at(Stage::Load))?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.span = index;
        rodata.arg_words = target.arg_words;
        // Beyond the arguments: there is none.
        rodata.skb_word = target.skb_word.unwrap_or(target.arg_words);
        // The packet tells calls apart best; else the first argument, which mostly is the object worked on.
        rodata.fingerprint_word = target.skb_word.unwrap_or(0);
        rodata.returns = (target.ret != Return::Void).into();
        rodata.set_mask = (1 << room.log2_sets) - 1;
    }
    open.maps.dwell_ring.reuse_fd(shared.ring.as_fd()).map_err(at(Stage::Load))?;
    open.maps.dwell_control.reuse_fd(shared.control.as_fd()).map_err(at(Stage::Load))?;
    open.maps.dwell_overflow.set_max_entries(room.overflow).map_err(at(Stage::Load))?;

    let function = match &target.module {
        Some(module) => format!("{module}:{}", target.function),
        None => target.function.clone(),
    };
    let progs = &mut open.progs;
    let (table, hash) = (room.store == Store::Table, room.store == Store::HashMap);
    for (prog, wanted) in [
        (&mut progs.call_entry, table),
        (&mut progs.call_exit, table),
        (&mut progs.call_entry_hash, hash),
        (&mut progs.call_exit_hash, hash),
    ] {
        choose(prog, wanted.then_some(&function)).map_err(at(Stage::Load))?;
    }

    let skel = open.load().map_err(at(Stage::Load))?;
    let (entry, exit) = match room.store {
        Store::Table => (&skel.progs.call_entry, &skel.progs.call_exit),
        Store::HashMap => (&skel.progs.call_entry_hash, &skel.progs.call_exit_hash),
    };
    // Before the first call, so that the reader never misses a skipped one.
    let both = (duplicate(entry).map_err(at(Stage::Load))?, duplicate(exit).map_err(at(Stage::Load))?);
    shared.programs.lock().push(both);
    // The exit first, so that every call whose entry is seen can have its exit seen.
    let exit_link = exit.attach_trace().map_err(at(Stage::Attach))?;
    let entry_link = entry.attach_trace().map_err(at(Stage::Attach))?;
    let state = MapHandle::try_from(&skel.maps.bss).map_err(at(Stage::Load))?;
    Ok(AttachedSpan {
        links: Some(Links { _exit: exit_link, _entry: entry_link }),
        last: Mutex::new(vec![0; state.value_size() as usize]),
        state,
        programs: Arc::clone(&shared.programs),
        index: index as usize,
    })
}

fn choose(prog: &mut OpenProgramMut<'_>, function: Option<&String>) -> libbpf_rs::Result<()> {
    prog.set_autoload(function.is_some());
    match function {
        Some(function) => prog.set_attach_target(0, Some(function.clone())),
        None => Ok(()),
    }
}

fn duplicate(prog: &ProgramMut<'_>) -> libbpf_rs::Result<OwnedFd> {
    prog.as_fd().try_clone_to_owned().map_err(|error| {
        libbpf_rs::Error::from_raw_os_error(error.raw_os_error().unwrap_or(EMFILE)).context("duplicating a descriptor")
    })
}

const ESRCH: i32 = 3;
const E2BIG: i32 = 7;
const EINVAL: i32 = 22;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
/// Arguments that every kernel's trampolines can save on x86-64.
const CERTAIN_WORDS: u32 = 6;
/// How many of libbpf's lines an error keeps.
const LOG_LINES: usize = 20;

/// Makes of the kernel's errno what it means for this function.
fn explain(failure: Failure, name: &str, target: &Target, mut log: Vec<String>) -> Error {
    let errno = errno(&failure.error);
    let lacks_admin = target.module.is_some() && kernel::lacks(Capability::SysAdmin);
    let error: Error = match errno {
        // Before 6.6 there were trampolines for six registers only, and the same errno as for none at all.
        ENOTSUPP if target.arg_words > CERTAIN_WORDS => {
            Error::not_traceable(name, NotTraceable::TooManyArguments { words: target.arg_words })
        }
        // A module's type information is a kernel object, and to open one takes CAP_SYS_ADMIN.
        EPERM | ESRCH if lacks_admin => Error::no_privilege(vec![Capability::SysAdmin]),
        EPERM | ENOTSUPP => {
            refusal(errno).unwrap_or_else(|| ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() }.into())
        }
        E2BIG if failure.stage == Stage::Attach => Error::not_traceable(name, NotTraceable::TooManyProbes),
        ENOMEM | ENFILE | EMFILE => {
            refusal(errno).unwrap_or_else(|| system_error(&format!("attaching to `{name}`"), &failure.error))
        }
        _ => {
            let reason = kernel::why_not_attached(target.module.as_deref(), &target.function).unwrap_or_else(|| {
                log.drain(..log.len().saturating_sub(LOG_LINES));
                NotTraceable::Refused { errno, log }
            });
            Error::not_traceable(name, reason)
        }
    };
    error.with_errno(errno)
}

impl AttachedSpan {
    /// Detaches; what has been counted can still be read.
    pub(crate) fn detach(&mut self) {
        self.links = None;
    }

    /// What the kernel has counted so far.
    ///
    /// Should the kernel have no memory to hand its counters over, they are those of the last time.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut bytes = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.state.lookup_into(&FIRST_KEY, &mut bytes, MapFlags::ANY);
        let (counters, open) = State::summary(&bytes).unwrap_or_default();
        Snapshot { counters, open, skipped: self.programs.skipped(self.index) }
    }
}

/// How often the kernel has skipped a program because it was running already; 0 on kernels before 5.12, which never
/// skip.
#[expect(unsafe_code, reason = "libbpf-rs offers this only for programs found by iterating over all of them")]
fn recursion_misses(prog: BorrowedFd<'_>) -> u64 {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    // SAFETY: `info` is a valid, zeroed `bpf_prog_info` of `len` bytes that the kernel may write to, and its pointer
    // members are NULL with their lengths 0, so that the kernel writes nowhere else.
    let result =
        unsafe { libbpf_sys::bpf_obj_get_info_by_fd(prog.as_raw_fd(), (&raw mut info).cast::<c_void>(), &raw mut len) };
    if result == 0 { info.recursion_misses } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// There is always room for as many calls as were asked for, and the table is never larger than it is.
    #[test]
    fn room() {
        for in_flight in [1, 2, 7, 8, 64, 1_000, 8_192, 1 << 20] {
            let room = Room::new(in_flight, Store::Table);
            let table = (WAYS as u32) << room.log2_sets;
            assert!(table + room.overflow >= in_flight && table <= (WAYS * SETS) as u32, "{in_flight}");
            assert!(in_flight < 8 || table <= in_flight / 2, "{in_flight}");
            assert_eq!(Room::new(in_flight, Store::HashMap).overflow, in_flight);
        }
        assert_eq!(Room::new(64, Store::Table).log2_sets, 3);
    }

    fn explained(stage: Stage, errno: i32, arg_words: u32) -> ErrorKind {
        let target = Target {
            // In no kernel's symbols, so that these have no say.
            function: "no_such_function".into(),
            module: None,
            arg_words,
            skb_word: None,
            ret: Return::Void,
        };
        let failure = Failure { stage, error: libbpf_rs::Error::from_raw_os_error(errno) };
        let log = (0..30).map(|n| format!("line {n}")).collect();
        let error = explain(failure, "f", &target, log);
        assert!(std::error::Error::source(&error).is_some(), "{error}");
        error.kind().clone()
    }

    fn reason(stage: Stage, errno: i32, arg_words: u32) -> NotTraceable {
        match explained(stage, errno, arg_words) {
            ErrorKind::NotTraceable { function, reason } => {
                assert_eq!(function, "f");
                reason
            }
            other => panic!("{other:?}"),
        }
    }

    /// What the kernel's errno means, where a kernel that answers so may not be at hand.
    #[test]
    fn explains_errnos() {
        for (stage, errno) in [(Stage::Load, EPERM), (Stage::Attach, EPERM), (Stage::Attach, ENOTSUPP)] {
            let kind = explained(stage, errno, 4);
            assert_eq!(kind, ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() });
        }
        assert_eq!(reason(Stage::Attach, ENOTSUPP, 8), NotTraceable::TooManyArguments { words: 8 });
        assert_eq!(reason(Stage::Attach, E2BIG, 4), NotTraceable::TooManyProbes);
        for errno in [ENOMEM, ENFILE, EMFILE] {
            let action = "attaching to `f`".to_owned();
            assert_eq!(explained(Stage::Load, errno, 4), ErrorKind::System { action, errno });
        }
        // The function isn't in kallsyms, if that can be read; the kernel's own answer, if not.
        let reason = reason(Stage::Load, EINVAL, 4);
        match reason {
            NotTraceable::Inlined => {}
            NotTraceable::Refused { errno, log } => assert_eq!((errno, log.len(), &*log[19]), (EINVAL, 20, "line 29")),
            other => panic!("{other:?}"),
        }
    }
}
