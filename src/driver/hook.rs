//! The hooks of a span: an object for up to ten of them, and the next ones share the maps of the first.

use std::hash::{BuildHasher as _, RandomState};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use libbpf_rs::skel::{OpenSkel, Skel as _, SkelBuilder as _};
use libbpf_rs::{Link, OpenObject, OpenProgramMut, ProgramAttachType, ProgramMut};

use super::memory::{MapBytes, add_maps};
use super::object::{Context, builder, prepare};
use super::skel::hook::{HookProgs, HookSkelBuilder, OpenHookProgs, OpenHookSkel, types};
use super::span::{Part, Step, at, explain, explained};
use super::state::StateMaps;
use super::{messages, system_error};
use crate::error::Error;
use crate::pairing::Store;
use crate::plan::{HookPlan, NO_WORD, Role, Site, SubjectPlan};
use crate::span::Restart;
use crate::wire::{RawFlow, outcome};

/// The 32-bit words of a `struct dwell_flow`.
const FLOW_WORDS: usize = size_of::<RawFlow>() / 4;
/// The hooks that one object has programs for.
const HOOKS: usize = 10;

/// Attaches a span's hooks: where a life ends first, then its ends, and its starts last. Nothing counts until the probe
/// is switched on, nor after it was switched off. On failure nothing is left.
pub(super) fn attach(context: &Context<'_>, hooks: &[HookPlan]) -> Result<Part, Error> {
    // Keyed at random for each.
    let random = RandomState::new();
    let flow_keys = [0, 1].map(|half| std::array::from_fn(|n| random.hash_one((half, n)) as u32));
    let object = Object { context, flow_keys };
    let mut hooks: Vec<(usize, &HookPlan)> = hooks.iter().enumerate().collect();
    hooks.sort_by_key(|(_, hook)| match hook.role {
        Role::Abandon { .. } => 0,
        Role::End => 1,
        Role::Start => 2,
    });
    let mut maps = None;
    let mut map_bytes = MapBytes::new();
    let mut links = Vec::new();
    for hooks in hooks.chunks(HOOKS) {
        object.load(hooks, &mut maps, &mut map_bytes, &mut links)?;
    }
    let Some(maps) = maps else { return Err(Error::config("span", "it has no hooks")) };
    Ok(Part { links, maps, map_bytes })
}

/// What the objects of a span have in common.
struct Object<'a> {
    context: &'a Context<'a>,
    flow_keys: [[u32; FLOW_WORDS]; 2],
}

impl Object<'_> {
    /// Loads up to [`HOOKS`] programs, and attaches them in this order.
    fn load(
        &self,
        hooks: &[(usize, &HookPlan)],
        first_maps: &mut Option<StateMaps>,
        map_bytes: &mut MapBytes,
        links: &mut Vec<Link>,
    ) -> Result<(), Error> {
        let mut object = MaybeUninit::uninit();
        let (skel, log) =
            messages::captured(|| self.open(&mut object, hooks, first_maps.as_ref()).and_then(OpenSkel::load));
        let skel = skel.map_err(|error| {
            let hook = hooks.get(blamed(&log)).map_or(hooks[0].1, |(_, hook)| hook);
            explain(&at(Step::Load)(error), &hook.site, log)
        })?;
        add_maps(map_bytes, skel.object());
        let programs = loaded(&skel.progs);
        for (n, (_, hook)) in hooks.iter().enumerate() {
            let program = programs[self.variant(hook)][n];
            links.push(explained(&hook.site, || {
                self.context
                    .shared
                    .programs
                    .add(self.context.place.span, hook.role, program)
                    .map_err(at(Step::Load))?;
                let link = match &hook.site {
                    Site::Tracepoint(tracepoint) if self.is_plain(hook) => {
                        program.attach_raw_tracepoint(&tracepoint.name)
                    }
                    _ => program.attach_trace(),
                };
                link.map_err(at(Step::Attach))
            })?);
        }
        if first_maps.is_none() {
            let (maps, plan) = (&skel.maps, self.context.plan);
            let identities = plan.identified.then_some(&maps.dwell_identities);
            let kept = StateMaps::keep(&maps.bss, &maps.dwell_overflow, &maps.data_doubt, identities, plan.max_age);
            *first_maps = Some(kept.map_err(|error| system_error("duplicating a descriptor", &error))?);
        }
        Ok(())
    }

    fn open<'o>(
        &self,
        object: &'o mut MaybeUninit<OpenObject>,
        hooks: &[(usize, &HookPlan)],
        maps: Option<&StateMaps>,
    ) -> libbpf_rs::Result<OpenHookSkel<'o>> {
        let plan = self.context.plan;
        let mut open = builder::<HookSkelBuilder>(self.context.shared)?.open(object)?;
        prepare!(&mut open, self.context);
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.keep_first = (plan.restart == Restart::KeepFirst).into();
            rodata.emit_abandoned = plan.with_abandoned.into();
            rodata.flow_keys = self.flow_keys;
            rodata.guard_head = plan.guard_head.into();
            rodata.suspect = plan.is_doubted().into();
            for (config, (part, hook)) in rodata.hooks.iter_mut().zip(hooks) {
                configure(config, self.context.end_of(*part), hook);
            }
        }
        if let Some(identities) = maps.and_then(StateMaps::identities) {
            open.maps.dwell_identities.reuse_fd(identities.as_fd())?;
        }
        if let Some([state, overflow, doubt]) = maps.map(StateMaps::handles) {
            open.maps.bss.reuse_fd(state.as_fd())?;
            open.maps.dwell_overflow.reuse_fd(overflow.as_fd())?;
            open.maps.data_doubt.reuse_fd(doubt.as_fd())?;
        }
        for (variant, programs) in opened(&mut open.progs).into_iter().enumerate() {
            for (n, program) in programs.into_iter().enumerate() {
                let hook = hooks.get(n).map(|(_, hook)| hook).filter(|hook| self.variant(hook) == variant);
                program.set_autoload(hook.is_some());
                if let Some(hook) = hook.filter(|hook| !self.is_plain(hook)) {
                    let (attach_type, target) = match &hook.site {
                        Site::Entry(function) => (ProgramAttachType::TraceFentry, function.to_string()),
                        Site::Exit(function) => (ProgramAttachType::TraceFexit, function.to_string()),
                        Site::Tracepoint(tracepoint) => (ProgramAttachType::TraceRawTp, tracepoint.name.clone()),
                    };
                    program.set_attach_type(attach_type);
                    program.set_attach_target(0, Some(target))?;
                }
            }
        }
        Ok(open)
    }

    fn is_plain(&self, hook: &HookPlan) -> bool {
        hook.is_tracepoint() && !self.context.shared.typed
    }

    /// Which of a hook's programs it is, as `opened` and `loaded` have them.
    fn variant(&self, hook: &HookPlan) -> usize {
        2 * usize::from(self.is_plain(hook)) + usize::from(self.context.room.store == Store::HashMap)
    }
}

fn configure(config: &mut types::hook, end: u32, hook: &HookPlan) {
    config.end = end;
    config.key_source = hook.source as u32;
    config.key_word = hook.key_word;
    config.skb_word = hook.skb_word.unwrap_or(NO_WORD);
    config.return_word = hook.return_word().unwrap_or(NO_WORD);
    // enum role in hook.bpf.c
    (config.role, config.outcome, config.reason_word) = match hook.role {
        Role::Start => (0, outcome::REACHED, NO_WORD),
        Role::End => (1, outcome::REACHED, NO_WORD),
        Role::Abandon { outcome, reason_word, .. } => (2, outcome, reason_word.unwrap_or(NO_WORD)),
    };
    config.reversed = hook.reversed.into();
    config.late = hook.late.into();
    let SubjectPlan { source, word, sock_word } = hook.subject;
    (config.subject_source, config.subject_word, config.subject_sock) = (source as u32, word, sock_word);
}

fn opened<'a, 'o>(progs: &'a mut OpenHookProgs<'o>) -> [[&'a mut OpenProgramMut<'o>; HOOKS]; 4] {
    let p = progs;
    [
        [
            &mut p.hook_0,
            &mut p.hook_1,
            &mut p.hook_2,
            &mut p.hook_3,
            &mut p.hook_4,
            &mut p.hook_5,
            &mut p.hook_6,
            &mut p.hook_7,
            &mut p.hook_8,
            &mut p.hook_9,
        ],
        [
            &mut p.hook_hash_0,
            &mut p.hook_hash_1,
            &mut p.hook_hash_2,
            &mut p.hook_hash_3,
            &mut p.hook_hash_4,
            &mut p.hook_hash_5,
            &mut p.hook_hash_6,
            &mut p.hook_hash_7,
            &mut p.hook_hash_8,
            &mut p.hook_hash_9,
        ],
        [
            &mut p.plain_0,
            &mut p.plain_1,
            &mut p.plain_2,
            &mut p.plain_3,
            &mut p.plain_4,
            &mut p.plain_5,
            &mut p.plain_6,
            &mut p.plain_7,
            &mut p.plain_8,
            &mut p.plain_9,
        ],
        [
            &mut p.plain_hash_0,
            &mut p.plain_hash_1,
            &mut p.plain_hash_2,
            &mut p.plain_hash_3,
            &mut p.plain_hash_4,
            &mut p.plain_hash_5,
            &mut p.plain_hash_6,
            &mut p.plain_hash_7,
            &mut p.plain_hash_8,
            &mut p.plain_hash_9,
        ],
    ]
}

fn loaded<'a, 'o>(progs: &'a HookProgs<'o>) -> [[&'a ProgramMut<'o>; HOOKS]; 4] {
    let p = progs;
    [
        [&p.hook_0, &p.hook_1, &p.hook_2, &p.hook_3, &p.hook_4, &p.hook_5, &p.hook_6, &p.hook_7, &p.hook_8, &p.hook_9],
        [
            &p.hook_hash_0,
            &p.hook_hash_1,
            &p.hook_hash_2,
            &p.hook_hash_3,
            &p.hook_hash_4,
            &p.hook_hash_5,
            &p.hook_hash_6,
            &p.hook_hash_7,
            &p.hook_hash_8,
            &p.hook_hash_9,
        ],
        [
            &p.plain_0, &p.plain_1, &p.plain_2, &p.plain_3, &p.plain_4, &p.plain_5, &p.plain_6, &p.plain_7, &p.plain_8,
            &p.plain_9,
        ],
        [
            &p.plain_hash_0,
            &p.plain_hash_1,
            &p.plain_hash_2,
            &p.plain_hash_3,
            &p.plain_hash_4,
            &p.plain_hash_5,
            &p.plain_hash_6,
            &p.plain_hash_7,
            &p.plain_hash_8,
            &p.plain_hash_9,
        ],
    ]
}

/// The number of the program that wasn't accepted, from what libbpf says: `prog 'hook_3': failed to load: -22`.
fn blamed(log: &[String]) -> usize {
    let number = |line: &String| {
        let (_, rest) = line.split_once("prog '")?;
        let (name, rest) = rest.split_once('\'')?;
        rest.contains("failed").then_some(())?;
        name.rsplit('_').next()?.parse().ok()
    };
    log.iter().rev().find_map(number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program that the kernel refused is found in what libbpf says.
    #[test]
    fn finds_the_culprit() {
        let log = |lines: &[&str]| lines.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let refused = log(&[
            "libbpf: prog 'hook_hash_3': BPF program load failed: -EINVAL",
            "libbpf: prog 'hook_hash_3': -- BEGIN PROG LOAD LOG --",
            "invalid access",
            "libbpf: prog 'hook_hash_3': failed to load: -EINVAL",
            "libbpf: failed to load object 'hook_bpf'",
        ]);
        assert_eq!(blamed(&refused), 3);
        assert_eq!(blamed(&log(&["libbpf: failed to load object 'hook_bpf'"])), 0);
    }
}
