//! The one module that uses libbpf: loads and attaches programs, and reads what they write.

mod call;
mod doubt;
mod hook;
#[cfg(not(dwell_docs))]
mod layout;
mod messages;
mod reader;
mod room;
mod skel;
mod span;
mod state;
pub(crate) mod trials;

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use libbpf_rs::{ErrorExt as _, MapCore as _, MapFlags, MapHandle, MapType, libbpf_sys};

pub use messages::{LibbpfLevel, LibbpfLog, set_libbpf_log};
pub(crate) use reader::Reader;
pub(crate) use room::choose_store;
pub(crate) use span::{AttachedSpan, attach};

use self::state::{Programs, StateMaps};
use crate::error::{Capability, Error};
use crate::kernel;
use crate::pairing::Store;
use crate::wire::Control;

/// The key of an array's only element.
const FIRST_KEY: [u8; 4] = [0; 4];

/// What all spans of a probe share.
#[derive(Debug)]
pub(crate) struct Shared {
    ring: MapHandle,
    control: MapHandle,
    store: Store,
    typed: bool,
    programs: Arc<Programs>,
    watched: Watched,
}

/// The maps that the reader sweeps from time to time, as long as their spans live.
type Watched = Arc<Mutex<Vec<Weak<StateMaps>>>>;

impl Shared {
    /// Creates the maps; `ring_bytes` is a power of two and a multiple of the page size.
    pub(crate) fn create(ring_bytes: u32, store: Store, typed: bool) -> Result<Self, Error> {
        let (shared, _) = messages::captured(|| {
            Ok(Self {
                ring: create_map(MapType::RingBuf, "dwell_ring", 0, 0, ring_bytes)
                    .context("creating the ring buffer")?,
                control: create_map(MapType::Array, "dwell_control", 4, 8, Control::COUNT).context("creating a map")?,
                store,
                typed,
                programs: Arc::default(),
                watched: Arc::default(),
            })
        });
        shared.map_err(|error: libbpf_rs::Error| {
            let action = error.to_string();
            refusal(errno(&error)).unwrap_or_else(|| system_error(&action, &error))
        })
    }

    /// From here on calls count; see `is_on()` in the programs.
    pub(crate) fn switch_on(&self) -> Result<Switch, Error> {
        let switched = self.control.update(&Control::On.key(), &Control::SET, MapFlags::ANY);
        let control = switched.and_then(|()| MapHandle::try_from(&self.control));
        Ok(Switch(control.map_err(|error| system_error("switching the probe on", &error))?))
    }

    fn watch(&self, maps: &Arc<StateMaps>) {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(maps));
    }
}

/// What switches the programs of a running probe off.
#[derive(Debug)]
pub(crate) struct Switch(MapHandle);

impl Switch {
    /// From here on nothing counts, starts or ends.
    pub(crate) fn off(&self) {
        // An update of an existing element of an array takes no memory, and can't fail. If it did, a packet that is freed
        // while the hooks go one by one might lend its start to another.
        let _ = self.0.update(&Control::On.key(), &Control::CLEAR, MapFlags::ANY);
    }
}

/// In the programs 0 means that there is no bound.
fn nanos(age: Duration) -> u64 {
    u64::try_from(age.as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn create_map(ty: MapType, name: &str, key: u32, value: u32, entries: u32) -> libbpf_rs::Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(ty, Some(name), key, value, entries, &options)
}

/// What it means that the kernel refuses a process that has the capabilities it was checked for; `None`: that it does.
fn refusal(errno: i32) -> Option<Error> {
    let namespace = (errno == EPERM).then(kernel::why_refused_with_all_capabilities).flatten();
    let locked_memory = || {
        let limited = [EPERM, ENOMEM].contains(&errno) && kernel::locked_memory_is_limited();
        (limited && kernel::lacks(Capability::SysResource)).then(|| Error::no_privilege(vec![Capability::SysResource]))
    };
    namespace.or_else(locked_memory)
}

pub(crate) const EPERM: i32 = 1;
const ESRCH: i32 = 3;
const E2BIG: i32 = 7;
const ENOMEM: i32 = 12;
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

/// The ring buffer's size for a wanted number of bytes: the next power of two that is a multiple of the page size.
pub(crate) fn ring_size(bytes: usize) -> Option<u32> {
    round_ring(bytes, rustix::param::page_size())
}

fn round_ring(bytes: usize, page: usize) -> Option<u32> {
    /// The kernel would take 2 GiB, but libbpf maps a ring twice.
    const LARGEST: usize = 1 << 30;
    if bytes == 0 || bytes > LARGEST {
        return None;
    }
    u32::try_from(bytes.max(page).next_power_of_two()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size becomes a power of two and a multiple of the page, not smaller than asked for, or is refused.
    #[test]
    fn ring_sizes() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for bytes in [1, 4095, 4097, 699_050, 1 << 20, 3 << 20, 1 << 30] {
                let size = round_ring(bytes, page).unwrap() as usize;
                assert!(size >= bytes && size.is_power_of_two() && size % page == 0, "{bytes} {page}: {size}");
            }
            for bytes in [0, (1 << 30) + 1, 1 << 31, u32::MAX as usize, usize::MAX] {
                assert_eq!(round_ring(bytes, page), None);
            }
        }
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
