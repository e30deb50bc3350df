//! The calls of one function: an object of its own, specialised, loaded, attached, and then reduced to its links and maps.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use super::room::Room;
use super::skel;
use super::span::{Failure, Part, Step, at, choose, explained};
use super::state::StateMaps;
use super::{Shared, nanos};
use crate::error::Error;
use crate::kernel::Return;
use crate::pairing::Store;
use crate::plan::{CallPlan, ConditionKind, Role, SpanPlan};

/// Attaches part `part` of span `span`; on failure nothing of it is left.
pub(super) fn attach(
    shared: &Shared,
    (span, part): (usize, usize),
    plan: &SpanPlan,
    call: &CallPlan,
    room: &Room,
) -> Result<Part, Error> {
    let name = call.function.to_string();
    explained(&name, Some(&call.function), || load(shared, (span, part), plan, call, room))
}

fn load(
    shared: &Shared,
    (span, part): (usize, usize),
    plan: &SpanPlan,
    call: &CallPlan,
    room: &Room,
) -> Result<Part, Failure> {
    let loading = at(Step::Load);
    let signature = &call.function.signature;
    let words = signature.words();
    let mut object = MaybeUninit::uninit();
    let mut open = skel::call::CallSkelBuilder::default().open(&mut object).map_err(&loading)?;
    if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
        rodata.span = span as u32;
        rodata.part = part as u32;
        rodata.arg_words = words;
        // Beyond the arguments: there is none.
        rodata.skb_word = call.skb_word.unwrap_or(words);
        // The packet tells calls apart best; else the first argument, which mostly is the object worked on.
        rodata.fingerprint_word = call.skb_word.unwrap_or(0);
        rodata.returns = (signature.ret != Return::Void).into();
        rodata.set_mask = room.set_mask();
        rodata.max_age_ns = plan.max_age.map_or(0, nanos);
        if let Some(condition) = call.condition {
            rodata.condition_word = condition.word;
            // enum condition in call.bpf.c
            (rodata.condition, rodata.nf_hook) = match condition.what {
                ConditionKind::TcIngress => (1, 0),
                ConditionKind::TcEgress => (2, 0),
                ConditionKind::NfHook(hook) => (3, hook),
            };
        }
    }
    open.maps.dwell_ring.reuse_fd(shared.ring.as_fd()).map_err(&loading)?;
    open.maps.dwell_control.reuse_fd(shared.control.as_fd()).map_err(&loading)?;
    open.maps.dwell_overflow.set_max_entries(room.overflow).map_err(&loading)?;

    let target = call.function.to_string();
    let progs = &mut open.progs;
    let (table, hash) = (room.store == Store::Table, room.store == Store::HashMap);
    for (prog, wanted) in [
        (&mut progs.call_entry, table),
        (&mut progs.call_exit, table),
        (&mut progs.call_entry_hash, hash),
        (&mut progs.call_exit_hash, hash),
    ] {
        choose(prog, wanted.then_some(&target)).map_err(&loading)?;
    }

    let skel = open.load().map_err(&loading)?;
    let (entry, exit) = match room.store {
        Store::Table => (&skel.progs.call_entry, &skel.progs.call_exit),
        Store::HashMap => (&skel.progs.call_entry_hash, &skel.progs.call_exit_hash),
    };
    shared.programs.add(span, Role::Start, entry).map_err(&loading)?;
    shared.programs.add(span, Role::End, exit).map_err(&loading)?;
    let state = MapHandle::try_from(&skel.maps.bss).map_err(&loading)?;
    let overflow = MapHandle::try_from(&skel.maps.dwell_overflow).map_err(&loading)?;
    let attaching = at(Step::Attach);
    // The exit first, so that every call whose entry is seen can have its exit seen.
    let exit = exit.attach_trace().map_err(&attaching)?;
    let entry = entry.attach_trace().map_err(&attaching)?;
    Ok(Part { links: vec![exit, entry], maps: StateMaps::new(state, overflow, plan.max_age) })
}
