//! The one module that uses libbpf: loads and attaches programs, and reads what they write.

mod call;
mod doubt;
mod hook;
mod intake;
mod latencies;
#[cfg(not(dwell_docs))]
mod layout;
mod memory;
mod messages;
mod object;
mod reader;
mod rings;
mod room;
mod signals;
mod skel;
mod slowest;
mod span;
mod state;
mod stop;
mod tally;
pub(crate) mod trials;
mod types;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use libbpf_rs::{ErrorExt as _, MapCore as _, MapFlags, MapHandle, MapType, libbpf_sys};
use rustix::param::page_size;

pub(crate) use latencies::Reading;
pub(crate) use memory::kernel_memory;
pub use messages::{LibbpfLevel, LibbpfLog, set_libbpf_log};
pub(crate) use reader::Reader;
pub(crate) use room::choose_store;
#[cfg(any(test, fuzzing))]
pub(crate) use slowest::kept_records;
pub(crate) use span::{AttachedSpan, Snapshot, attach_all};
pub(crate) use tally::{SpanTally, Tally};

use self::rings::{CALL_STRIDE, stride};
use self::state::{Programs, StateMaps};
use self::types::CoreTypes;
use crate::error::{Capability, Error, ErrorKind};
use crate::kernel::{self, PreemptCount};
use crate::pairing::Store;
use crate::wire::RingHead;

/// The key of an array's only element.
const FIRST_KEY: [u8; 4] = [0; 4];

/// What all spans of a probe share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Carries the records, or, where there are `rings`, only wakes the reader. `None`: nobody wants events.
    ring: Option<MapHandle>,
    rings: Option<Rings>,
    on: MapHandle,
    wake: MapHandle,
    /// That there can ever be: their numbers are below this.
    cpus: u32,
    store: Store,
    typed: bool,
    sessions: bool,
    reads_memory: bool,
    preempt_count: Option<PreemptCount>,
    programs: Arc<Programs>,
    watched: Watched,
    /// `None`: libbpf is to look through all that the kernel has.
    types: Option<CoreTypes>,
}

/// A ring for each CPU, in one map.
#[derive(Debug)]
struct Rings {
    map: MapHandle,
    /// A power of two.
    slots: u32,
    /// The bytes of a slot.
    stride: u32,
}

/// The maps that are swept from time to time, as long as their spans live.
type Watched = Arc<Mutex<Vec<Weak<StateMaps>>>>;

/// What to create for a probe.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wishes {
    /// The rings' size, as asked for; `None`: nobody wants events.
    pub(crate) ring_bytes: Option<usize>,
    /// The bytes of the largest records of its spans.
    pub(crate) records: usize,
    /// Tracepoints' arguments can be followed.
    pub(crate) typed: bool,
    /// Calls may be paired by sessions.
    pub(crate) sessions: bool,
    /// Packets' headers can be read.
    pub(crate) headers: bool,
    /// For those that tell for whom CPUs work.
    pub(crate) preempt_count: Option<PreemptCount>,
}

impl Shared {
    /// `core_types` is BTF of the types that the programs read.
    pub(crate) fn create(store: Store, wishes: Wishes, core_types: Option<Vec<u8>>) -> Result<Self, Error> {
        let cpus = possible_cpus() as u32;
        // Tried with libbpf's messages captured, which doesn't nest.
        let wishes = Wishes { sessions: wishes.sessions && trials::has_sessions(), ..wishes };
        let (shared, _) = messages::captured(|| Self::create_maps(store, cpus, wishes));
        let shared = shared.map_err(|error: libbpf_rs::Error| {
            let action = error.to_string();
            refusal(errno(&error)).unwrap_or_else(|| system_error(&action, &error))
        })?;
        Ok(Self { types: core_types.and_then(|btf| CoreTypes::new(&btf)), ..shared })
    }

    fn create_maps(store: Store, cpus: u32, wishes: Wishes) -> libbpf_rs::Result<Self> {
        let flag = |name| create_flag(name).context("creating a map");
        let (mut ring, mut rings) = (None, None);
        if let Some(bytes) = wishes.ring_bytes {
            let bytes = match store {
                Store::HashMap => ring_size(bytes),
                Store::Table => {
                    rings =
                        Some(Rings::create(bytes, cpus, stride(wishes.records) as u32).context("creating the rings")?);
                    page_size() as u32
                }
            };
            ring =
                Some(create_map(MapType::RingBuf, "dwell_ring", 0, 0, bytes, 0).context("creating the ring buffer")?);
        }
        Ok(Self {
            ring,
            rings,
            on: flag(".data.on")?,
            wake: flag(".data.wake")?,
            cpus,
            store,
            typed: wishes.typed,
            sessions: wishes.sessions,
            reads_memory: wishes.headers,
            preempt_count: wishes.preempt_count,
            programs: Arc::default(),
            watched: Arc::default(),
            types: None,
        })
    }

    /// From here on calls count; see `probe_on` in the programs.
    pub(crate) fn switch_on(&self) -> Result<Switch, Error> {
        let switched = self.on.update(&FIRST_KEY, &SET, MapFlags::ANY);
        let on = switched.and_then(|()| MapHandle::try_from(&self.on));
        Ok(Switch(on.map_err(|error| system_error("switching the probe on", &error))?))
    }

    fn watch(&self, maps: &Arc<StateMaps>) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(maps));
    }
}

/// That there can ever be, online or not: their numbers are below this.
pub(crate) fn possible_cpus() -> usize {
    // It is read from a file that every kernel has; where /sys isn't mounted, there is BTF neither.
    libbpf_rs::num_possible_cpus().unwrap_or(1).max(1)
}

impl Rings {
    /// Together of about this size.
    fn create(bytes: usize, cpus: u32, stride: u32) -> libbpf_rs::Result<Self> {
        let slots = slots_of_ring(bytes, cpus, stride);
        let size = size_of::<RingHead>() as u32 + slots * stride;
        let map = create_map(MapType::Array, "dwell_rings", 4, size, cpus, libbpf_sys::BPF_F_MMAPABLE)?;
        Ok(Self { map, slots, stride })
    }

    /// Whether there is only room for the records of calls.
    fn is_short(&self) -> bool {
        self.stride as usize == CALL_STRIDE
    }
}

/// How many records fit into each CPU's share, as a power of two.
fn slots_of_ring(bytes: usize, cpus: u32, stride: u32) -> u32 {
    let share = bytes / cpus.max(1) as usize / stride as usize;
    // The kernel has memory for elements of up to 4 MiB.
    let most = ((4 << 20) - size_of::<RingHead>()) / stride as usize;
    let slots = share.clamp(FEWEST_SLOTS, most);
    1 << slots.ilog2()
}

/// In each CPU's ring.
const FEWEST_SLOTS: usize = 8;

/// What switches the programs of a running probe off.
#[derive(Debug)]
pub(crate) struct Switch(MapHandle);

impl Switch {
    /// From here on nothing starts, and no span between hooks ends. Calls that have begun may still end.
    pub(crate) fn off(&self) {
        // An update of an existing element of an array takes no memory, and can't fail. If it did, a packet that is freed
        // while the hooks go one by one might lend its start to another.
        let _ = self.0.update(&FIRST_KEY, &CLEAR, MapFlags::ANY);
    }
}

/// The value of the maps that are switches.
const SET: [u8; 8] = 1_u64.to_ne_bytes();
const CLEAR: [u8; 8] = 0_u64.to_ne_bytes();

/// A word that programs have as a variable, in a section of this name.
fn create_flag(name: &str) -> libbpf_rs::Result<MapHandle> {
    create_map(MapType::Array, name, 4, 8, 1, libbpf_sys::BPF_F_MMAPABLE)
}

fn create_map(ty: MapType, name: &str, key: u32, value: u32, entries: u32, flags: u32) -> libbpf_rs::Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        map_flags: flags,
        ..Default::default()
    };
    MapHandle::create(ty, Some(name), key, value, entries, &options)
}

/// Has the kernel count runs and times of all programs, until what it returns is closed.
pub(crate) fn enable_statistics() -> Result<OwnedFd, Error> {
    state::enable_statistics().map_err(|errno| {
        let lacking = errno == EPERM && kernel::lacks(Capability::SysAdmin);
        let error = if lacking {
            Error::no_privilege("counting what programs cost", vec![Capability::SysAdmin])
        } else {
            refusal(errno).unwrap_or_else(|| Error::system("enabling the statistics of programs", errno))
        };
        error.with_errno(errno)
    })
}

/// What it means that the kernel refuses a process that has the capabilities it was checked for; `None`: that it does.
fn refusal(errno: i32) -> Option<Error> {
    let namespace = (errno == EPERM).then(kernel::why_refused_with_all_capabilities).flatten();
    let locked_memory = || {
        let limit = [EPERM, ENOMEM].contains(&errno).then(kernel::locked_memory_limit).flatten();
        // With the capability libbpf has lifted it.
        let limit = limit.filter(|_| kernel::lacks(Capability::SysResource));
        limit.map(|limit| ErrorKind::LockedMemory { limit }.into())
    };
    namespace.or_else(locked_memory)
}

pub(crate) const EPERM: i32 = 1;
const ESRCH: i32 = 3;
const E2BIG: i32 = 7;
const ENOMEM: i32 = 12;
pub(crate) const EBUSY: i32 = 16;
pub(crate) const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;

/// The errno within one of libbpf-rs' errors, which only shows it in its text.
fn errno(error: &libbpf_rs::Error) -> i32 {
    let text = format!("{error:#}");
    let number = text.rsplit_once("(os error ").and_then(|(_, rest)| rest.trim_end_matches(')').parse().ok());
    number.unwrap_or(0)
}

fn system_error(action: &str, error: &libbpf_rs::Error) -> Error {
    let errno = errno(error);
    Error::system(action, errno).with_errno(errno)
}

/// The most bytes that may be asked for the rings of a probe.
pub(crate) const LARGEST_RINGS: usize = 1 << 30;

/// The kernel's ring buffer's size for a wanted number of bytes: the next power of two that is a multiple of the page
/// size.
fn ring_size(bytes: usize) -> u32 {
    round_ring(bytes, page_size())
}

fn round_ring(bytes: usize, page: usize) -> u32 {
    bytes.min(LARGEST_RINGS).max(page).next_power_of_two() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size becomes a power of two and a multiple of the page, not smaller than asked for; what is more than there can
    /// be, which the builder refuses, the largest there is.
    #[test]
    fn ring_sizes() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for bytes in [0, 1, 4095, 4097, 699_050, 1 << 20, 3 << 20, 1 << 30, 1 << 31, u32::MAX as usize] {
                let size = round_ring(bytes, page) as usize;
                assert!(size.is_power_of_two() && size % page == 0, "{bytes} {page}: {size}");
                assert!(size >= bytes.min(1 << 30) && size < (2 * bytes).max(page + 1), "{bytes} {page}: {size}");
            }
        }
    }

    /// Each CPU has room for a few records at least, and an element isn't larger than the kernel can have.
    #[test]
    fn slots() {
        for (bytes, cpus) in [(0, 1), (1, 2), (4 << 20, 2), (4 << 20, 512), (1 << 30, 1), (1 << 30, 8192)] {
            for stride in [88, 144, 240, 768] {
                let slots = slots_of_ring(bytes, cpus, stride);
                assert!(slots.is_power_of_two() && slots >= 8, "{bytes} {cpus}");
                assert!(slots * stride + 128 <= 4 << 20, "{bytes} {cpus}");
            }
        }
        assert_eq!(slots_of_ring(4 << 20, 2, 88), 16_384);
    }

    /// The errno is found however deep it lies.
    #[test]
    fn errnos() {
        let error = libbpf_rs::Error::from_raw_os_error(524).context("one").context("two");
        assert_eq!(errno(&error), 524);
        let error = libbpf_rs::Error::from_raw_os_error(1);
        assert_eq!(errno(&error), 1);
    }
}
