//! What the objects of a probe have in common, whichever programs are in them.

use std::time::Duration;

use libbpf_rs::skel::SkelBuilder;

use super::Shared;
use super::latencies::Latencies;
use super::room::Room;
use super::slowest::Keeper;
use crate::decode::Place;
use crate::events::Events;
use crate::group::GroupBy;
use crate::plan::SpanPlan;

/// All that an object of a span is specialised by, and shares with the others.
#[derive(Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) shared: &'a Shared,
    pub(super) place: Place,
    pub(super) plan: &'a SpanPlan,
    pub(super) room: &'a Room,
    pub(super) latencies: &'a Latencies,
    pub(super) keeper: Option<&'a Keeper>,
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

/// Where the opening of an object begins.
pub(super) fn builder<'o, B: SkelBuilder<'o> + Default>(shared: &Shared) -> libbpf_rs::Result<B> {
    let mut builder = B::default();
    if let Some(types) = &shared.types {
        builder.object_builder_mut().btf_custom_path(types.path())?;
    }
    Ok(builder)
}

/// Specialises an opened object for its span, and gives it the maps that it shares. A macro, since each object has a
/// type of its own.
macro_rules! prepare {
    ($open:expr, $context:expr) => {{
        use std::os::fd::AsFd as _;

        use $crate::filter::{Instruction, Test};

        let open = &mut *$open;
        let $crate::driver::object::Context { shared, plan, room, latencies, keeper, .. } = *$context;
        let wanted = $crate::driver::object::Wanted::new(plan.events);
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.set_mask = room.set_mask();
            rodata.max_age_ns = $crate::driver::object::nanos(plan.max_age);
            rodata.group_by = $crate::driver::object::group_by(plan.group_by);
            rodata.wants_events = wanted.any;
            rodata.min_latency_ns = wanted.min_latency_ns;
            rodata.one_in = wanted.one_in;
            rodata.reads_memory = shared.reads_memory.into();
            rodata.inner_headers = plan.inner_headers.into();
            rodata.with_identity = plan.identified.into();
            rodata.needs_subject = (plan.identified || plan.tests.iter().any(Test::needs_subject)).into();
            rodata.with_story = plan.told.into();
            rodata.same_thread = plan.has_same_thread().into();
            if let Some(count) = &shared.preempt_count {
                rodata.preempt_count_offset = count.offset;
                rodata.per_cpu_offsets = count.per_cpu_offsets;
                (rodata.hardirq_bits, rodata.nmi_bits) = (count.hardirqs, count.nmis);
            }
            rodata.test_count = plan.tests.len() as u32;
            for (to, test) in rodata.tests.iter_mut().zip(&plan.tests) {
                let Test { field, negated, on_true, on_false, mask, low, high } = *test;
                (to.field, to.negated, to.on_true, to.on_false) = (field as u32, negated.into(), on_true, on_false);
                (to.mask, to.low, to.high) = (mask, low, high);
            }
            rodata.cbpf_count = plan.pcap.len() as u32;
            for (to, instruction) in rodata.cbpf.iter_mut().zip(&plan.pcap) {
                let Instruction { code, jt, jf, k } = *instruction;
                (to.code, to.jt, to.jf, to.k) = (code, jt, jf, k);
            }
            if let Some(keeper) = keeper {
                rodata.slowest_count = keeper.count() as u64;
                rodata.slowest_stride = keeper.stride() as u64;
            }
            if let Some(rings) = &shared.rings {
                rodata.ring_mask = rings.slots - 1;
                rodata.ring_stride = rings.stride;
            }
        }
        if plan.identified {
            open.maps.dwell_overflow.set_value_size(size_of::<$crate::wire::Waiting>() as u32)?;
        } else {
            open.maps.dwell_identities.set_autocreate(false)?;
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
        match keeper {
            Some(keeper) => {
                open.maps.dwell_slowest.reuse_fd(keeper.places().as_fd())?;
                open.maps.data_slowest.reuse_fd(keeper.generation().as_fd())?;
            }
            None => {
                open.maps.dwell_slowest.set_autocreate(false)?;
                open.maps.data_slowest.set_autocreate(false)?;
            }
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
