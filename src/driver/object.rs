//! What the objects of a probe have in common, whichever programs are in them.

use std::time::Duration;

use super::Shared;
use super::latencies::Latencies;
use super::room::Room;
use crate::decode::Place;
use crate::events::Events;
use crate::group::GroupBy;
use crate::plan::SpanPlan;

/// No word of a program's context, see `args.bpf.h`.
pub(super) const NO_WORD: u32 = 13;

/// All that an object of a span is specialised by, and shares with the others.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) shared: &'a Shared,
    pub(super) place: Place,
    pub(super) plan: &'a SpanPlan,
    pub(super) room: &'a Room,
    pub(super) latencies: &'a Latencies,
}

impl Context<'_> {
    /// The number of the span's end, or function, number `part`.
    pub(super) fn end_of(&self, part: usize) -> u32 {
        (self.place.first_end + part) as u32
    }
}

/// What `ring.bpf.h` has of [`Events`].
pub(super) struct Wanted {
    pub(super) any: u32,
    pub(super) min_latency_ns: u64,
    pub(super) one_in: u32,
}

impl Wanted {
    pub(super) fn new(events: Events) -> Self {
        let (any, min_latency_ns, one_in) = match events {
            Events::All => (1, 0, 1),
            Events::OverThreshold(latency) => (1, latency.as_nanos() as u64, 1),
            Events::OneIn(n) => (1, 0, n),
            Events::None => (0, 0, 1),
        };
        Self { any, min_latency_ns, one_in }
    }
}

/// `enum group_by` in `group.bpf.h`. To tell CPUs apart takes nothing: each has a row anyway.
pub(super) fn group_by(by: Option<GroupBy>) -> u32 {
    match by {
        None | Some(GroupBy::Cpu) => 0,
        Some(GroupBy::Interface) => 1,
        Some(GroupBy::Protocol) => 2,
        Some(GroupBy::LocalPort) => 3,
    }
}

/// In the programs 0 means that there is no bound.
pub(super) fn nanos(age: Option<Duration>) -> u64 {
    age.map_or(0, |age| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX).max(1))
}

/// Specialises an opened object for its span, and gives it the maps that it shares. A macro, since each object has a
/// type of its own.
macro_rules! prepare {
    ($open:expr, $context:expr) => {{
        use std::os::fd::AsFd as _;

        let open = &mut *$open;
        let $crate::driver::object::Context { shared, plan, room, latencies, .. } = *$context;
        let wanted = $crate::driver::object::Wanted::new(plan.events);
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.set_mask = room.set_mask();
            rodata.max_age_ns = $crate::driver::object::nanos(plan.max_age);
            rodata.group_by = $crate::driver::object::group_by(plan.group_by);
            rodata.wants_events = wanted.any;
            rodata.min_latency_ns = wanted.min_latency_ns;
            rodata.one_in = wanted.one_in;
            if let Some(rings) = &shared.rings {
                rodata.ring_mask = rings.slots - 1;
                rodata.ring_stride = rings.stride;
            }
        }
        open.maps.data_on.reuse_fd(shared.on.as_fd())?;
        open.maps.data_wake.reuse_fd(shared.wake.as_fd())?;
        open.maps.dwell_histograms.reuse_fd(latencies.rows().as_fd())?;
        open.maps.dwell_overflow.set_max_entries(room.overflow)?;
        // What this span's programs don't get to isn't created.
        match latencies.groups() {
            Some(groups) => open.maps.dwell_groups.reuse_fd(groups.as_fd())?,
            None => open.maps.dwell_groups.set_autocreate(false)?,
        }
        match &shared.ring {
            Some(ring) => open.maps.dwell_ring.reuse_fd(ring.as_fd())?,
            None => open.maps.dwell_ring.set_autocreate(false)?,
        }
        match &shared.rings {
            Some(rings) => open.maps.dwell_rings.reuse_fd(rings.map.as_fd())?,
            None => open.maps.dwell_rings.set_autocreate(false)?,
        }
    }};
}
pub(super) use prepare;
