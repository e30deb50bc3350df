//! How a span's started spans are stored.

use std::sync::OnceLock;

use super::trials::{self, Refusal};
use super::{EINVAL, refusal};
use crate::error::Error;
use crate::pairing::Store;
use crate::wire::{SETS, WAYS};

/// How many started spans there is room for, and where.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) store: Store,
    /// log2 of the sets of the table that are used.
    log2_sets: u32,
    /// Entries of the overflow map, or of the hash map that stands for all.
    pub(super) overflow: u32,
}

impl Room {
    /// Half of them in the table, as far as it goes, the rest in the map behind it. A set of the table can be full while
    /// others are empty, so the map is what guarantees the number.
    pub(super) fn new(in_flight: u32, store: Store) -> Self {
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

    /// Whether all of the table is used.
    pub(super) fn is_whole(&self) -> bool {
        self.store == Store::Table && 1 << self.log2_sets == SETS
    }

    pub(super) fn set_mask(&self) -> u32 {
        (1 << self.log2_sets) - 1
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

#[cfg(test)]
mod tests {
    use super::*;

    /// There is always room for as many as were asked for, and the table is never larger than it is.
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
}
