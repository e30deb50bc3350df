//! The calls of one function: an object of its own, specialised, loaded, attached, and then reduced to its links and maps.

use std::mem::MaybeUninit;

use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};

use super::memory::{MapBytes, add_maps};
use super::object::{Context, builder, prepare};
use super::span::{Failure, Part, Step, at, choose, explained};
use super::state::StateMaps;
use super::{Rings, skel};
use crate::error::Error;
use crate::kernel::Return;
use crate::pairing::{Pairing, Store};
use crate::plan::{CallPlan, ConditionKind, NO_WORD, Role, Site, SubjectPlan};

/// Attaches part `part` of a span; on failure nothing of it is left.
pub(super) fn attach(context: &Context<'_>, part: usize, call: &CallPlan, pairing: Pairing) -> Result<Part, Error> {
    let load = match pairing {
        Pairing::Session => load_session,
        _ => load_frames,
    };
    explained(&Site::Entry(call.function.clone()), || load(context, part, call))
}

/// Which of the programs for frames serve a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Build {
    Full,
    /// For what is mostly asked for, without events.
    Lean,
    /// The same with events, some or all; the first argument is the packet. The latter is for rings of short records.
    LeanSome,
    LeanAll,
    /// For kernels without compare-and-swap.
    Hash,
}

/// Which of the programs for sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionBuild {
    /// The cookie holds the time, and nothing else has to be kept.
    Cookie,
    CookieLean,
    /// Whatever else is wanted of the start waits in the table.
    Table,
    LeanSome,
    LeanAll,
}

impl Build {
    fn of(context: &Context<'_>, call: &CallPlan) -> Self {
        let is_lean = is_plain(context, call) && has_first_argument(call) && context.room.is_whole();
        match (context.room.store, context.plan.events.are_wanted()) {
            (Store::HashMap, _) => Self::Hash,
            (Store::Table, false) if is_lean => Self::Lean,
            (Store::Table, true) if is_lean && call.skb_word.is_some() => {
                if has_only_events(context) {
                    Self::LeanAll
                } else {
                    Self::LeanSome
                }
            }
            (Store::Table, _) => Self::Full,
        }
    }
}

impl SessionBuild {
    fn of(context: &Context<'_>, call: &CallPlan) -> Self {
        let is_plain = is_plain(context, call);
        if !context.plan.makes_records() && !context.plan.is_grouped() {
            return if is_plain { Self::CookieLean } else { Self::Cookie };
        }
        let is_lean = is_plain && call.skb_word == Some(0) && context.room.is_whole();
        match (is_lean, has_only_events(context)) {
            (true, true) => Self::LeanAll,
            (true, false) => Self::LeanSome,
            _ => Self::Table,
        }
    }
}

/// Whether nothing is asked for that mostly isn't.
fn is_plain(context: &Context<'_>, call: &CallPlan) -> bool {
    let plan = context.plan;
    let is_choosy = call.condition.is_some() || !plan.tests.is_empty();
    !is_choosy
        && !plan.is_grouped()
        && !plan.identified
        && !plan.told
        && plan.max_age.is_none()
        && plan.slowest.is_none()
}

/// Whether all calls become events, in rings that are for calls alone.
fn has_only_events(context: &Context<'_>) -> bool {
    context.plan.events.are_all() && context.shared.rings.as_ref().is_some_and(Rings::is_short)
}

/// Whether there is one, and it is the packet if any is.
fn has_first_argument(call: &CallPlan) -> bool {
    call.function.signature.words() > 0 && call.skb_word.unwrap_or(0) == 0
}

/// Specialises an opened object for a function. A macro, since each object has a type of its own.
macro_rules! prepare_call {
    ($open:expr, $context:expr, $part:expr, $call:expr) => {{
        prepare!($open, $context);
        let call: &CallPlan = $call;
        let signature = &call.function.signature;
        let words = signature.words();
        if let Some(rodata) = $open.maps.rodata_data.as_deref_mut() {
            rodata.end = $context.end_of($part).into();
            // Behind the arguments.
            rodata.return_word = if signature.ret == Return::Void { NO_WORD } else { words };
            rodata.skb_word = call.skb_word.unwrap_or(NO_WORD);
            // The packet tells calls apart best; else the first argument, which mostly is the object worked on.
            rodata.fingerprint_word = call.skb_word.unwrap_or(if words > 0 { 0 } else { NO_WORD });
            let SubjectPlan { source, word, sock_word } = call.subject;
            (rodata.subject_source, rodata.subject_word, rodata.subject_sock) = (source as u32, word, sock_word);
            if let Some(condition) = call.condition {
                rodata.condition_word = condition.word;
                // enum condition in call.bpf.h
                (rodata.condition, rodata.nf_hook) = match condition.what {
                    ConditionKind::TcIngress => (1, 0),
                    ConditionKind::TcEgress => (2, 0),
                    ConditionKind::NfHook(hook) => (3, hook),
                };
            }
        }
    }};
}

fn loading<T>(work: impl FnOnce() -> libbpf_rs::Result<T>) -> Result<T, Failure> {
    work().map_err(at(Step::Load))
}

/// An fentry and an fexit program.
fn load_frames(context: &Context<'_>, part: usize, call: &CallPlan) -> Result<Part, Failure> {
    let build = Build::of(context, call);
    let mut object = MaybeUninit::uninit();
    let place = &mut object;
    let skel = loading(move || {
        let mut open = builder::<skel::call::CallSkelBuilder>(context.shared)?.open(place)?;
        prepare_call!(&mut open, context, part, call);
        let target = call.function.to_string();
        let progs = &mut open.progs;
        for (builds, prog) in [
            (&[Build::Full][..], &mut progs.call_entry),
            (&[Build::Full], &mut progs.call_exit),
            (&[Build::Lean], &mut progs.call_entry_lean),
            (&[Build::Lean], &mut progs.call_exit_lean),
            (&[Build::LeanSome, Build::LeanAll], &mut progs.call_entry_lean_skb),
            (&[Build::LeanSome], &mut progs.call_exit_lean_some),
            (&[Build::LeanAll], &mut progs.call_exit_lean_all),
            (&[Build::Hash], &mut progs.call_entry_hash),
            (&[Build::Hash], &mut progs.call_exit_hash),
        ] {
            choose(prog, builds.contains(&build).then_some(&target))?;
        }
        open.load()
    })?;
    let progs = &skel.progs;
    let (entry, exit) = match build {
        Build::Full => (&progs.call_entry, &progs.call_exit),
        Build::Lean => (&progs.call_entry_lean, &progs.call_exit_lean),
        Build::LeanSome => (&progs.call_entry_lean_skb, &progs.call_exit_lean_some),
        Build::LeanAll => (&progs.call_entry_lean_skb, &progs.call_exit_lean_all),
        Build::Hash => (&progs.call_entry_hash, &progs.call_exit_hash),
    };
    let programs = &context.shared.programs;
    programs.add(context.place.span, Role::Start, entry).map_err(at(Step::Load))?;
    programs.add(context.place.span, Role::End, exit).map_err(at(Step::Load))?;
    let maps = &skel.maps;
    let identities = context.plan.identified.then_some(&maps.dwell_identities);
    let maps = StateMaps::keep(&maps.bss, &maps.dwell_overflow, &maps.data_doubt, identities, context.plan.max_age);
    let maps = maps.map_err(at(Step::Load))?;
    let mut map_bytes = MapBytes::new();
    add_maps(&mut map_bytes, skel.object());
    let attaching = at(Step::Attach);
    // The exit first, so that every call whose entry is seen can have its exit seen.
    let exit = exit.attach_trace().map_err(&attaching)?;
    let entry = entry.attach_trace().map_err(&attaching)?;
    Ok(Part { links: vec![exit, entry], maps, map_bytes })
}

/// One fsession program.
fn load_session(context: &Context<'_>, part: usize, call: &CallPlan) -> Result<Part, Failure> {
    let build = SessionBuild::of(context, call);
    let mut object = MaybeUninit::uninit();
    let place = &mut object;
    let skel = loading(move || {
        let mut open = builder::<skel::session::SessionSkelBuilder>(context.shared)?.open(place)?;
        prepare_call!(&mut open, context, part, call);
        let target = call.function.to_string();
        let progs = &mut open.progs;
        for (kind, prog) in [
            (SessionBuild::Cookie, &mut progs.call_session),
            (SessionBuild::CookieLean, &mut progs.call_session_lean),
            (SessionBuild::Table, &mut progs.call_session_table),
            (SessionBuild::LeanSome, &mut progs.call_session_lean_some),
            (SessionBuild::LeanAll, &mut progs.call_session_lean_all),
        ] {
            choose(prog, (kind == build).then_some(&target))?;
        }
        open.load()
    })?;
    let program = match build {
        SessionBuild::Cookie => &skel.progs.call_session,
        SessionBuild::CookieLean => &skel.progs.call_session_lean,
        SessionBuild::Table => &skel.progs.call_session_table,
        SessionBuild::LeanSome => &skel.progs.call_session_lean_some,
        SessionBuild::LeanAll => &skel.progs.call_session_lean_all,
    };
    context.shared.programs.add(context.place.span, Role::Start, program).map_err(at(Step::Load))?;
    let maps = &skel.maps;
    let identities = context.plan.identified.then_some(&maps.dwell_identities);
    let maps = StateMaps::keep(&maps.bss, &maps.dwell_overflow, &maps.data_doubt, identities, context.plan.max_age);
    let maps = maps.map_err(at(Step::Load))?;
    let mut map_bytes = MapBytes::new();
    add_maps(&mut map_bytes, skel.object());
    let link = program.attach_trace().map_err(at(Step::Attach))?;
    Ok(Part { links: vec![link], maps, map_bytes })
}
