//! What this kernel lets this process do, found by doing it. Each trial loads one program, attaches it where that is
//! another question, and takes it away again.

use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder};
use libbpf_rs::{MapType, OpenObject, ProgramInput};

use super::{EBUSY, create_map, errno, messages};
use crate::error::ENOTSUPP;
use crate::kernel::{self, FunctionTracer};

#[cfg(not(dwell_docs))]
#[allow(warnings, unsafe_code, clippy::all, clippy::restriction, reason = "generated code")]
mod skel {
    pub(super) mod features {
        include!(concat!(env!("OUT_DIR"), "/features.skel.rs"));
    }
    pub(super) mod feature_session {
        include!(concat!(env!("OUT_DIR"), "/feature_session.skel.rs"));
    }
}

/// What the kernel, or libbpf for it, said to a trial that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// What was tried: "loading an fentry program".
    pub(crate) action: String,
    pub(crate) errno: i32,
}

/// A trial's outcome.
pub(crate) type Trial = Result<(), Refusal>;

/// How far a trial goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    Loaded,
    /// Some refusals, such as that of an architecture without trampolines, only come then.
    Attached,
}

/// fentry and fexit.
pub(crate) fn trampolines() -> Trial {
    tracer_is_on()?;
    feature("has_fentry", "an fentry program", Until::Attached)?;
    feature("has_fexit", "an fexit program", Until::Attached)
}

/// One program for entry and exit.
pub(crate) fn sessions() -> Trial {
    tracer_is_on()?;
    let builder = skel::feature_session::FeatureSessionSkelBuilder::default();
    quietly(|| attempt(builder, "has_session", "an fsession program", Until::Attached))
}

/// Programs on raw tracepoints, which get their arguments as numbers.
pub(crate) fn raw_tracepoints() -> Trial {
    feature("has_raw_tracepoint", "a raw_tp program", Until::Attached)
}

/// Programs on raw tracepoints which get their arguments as typed pointers.
pub(crate) fn typed_tracepoints() -> Trial {
    feature("has_typed_tracepoint", "a tp_btf program", Until::Attached)
}

/// Whether functions can be traced; tried once for the process.
pub(crate) fn has_functions() -> bool {
    tracer_is_on().is_ok() && entries().is_ok()
}

/// Whether it is for want of trampolines on this architecture that functions can't be traced.
pub(crate) fn lacks_trampolines() -> bool {
    matches!(entries(), Err(Refusal { errno: ENOTSUPP, .. }))
}

fn entries() -> &'static Trial {
    static ANSWER: OnceLock<Trial> = OnceLock::new();
    ANSWER.get_or_init(|| feature("has_fentry", "an fentry program", Until::Attached))
}

/// Whether to use [`sessions`]; tried once for the process.
pub(crate) fn has_sessions() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| sessions().is_ok())
}

/// Whether to use [`typed_tracepoints`]; tried once for the process.
pub(crate) fn has_typed_tracepoints() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| typed_tracepoints().is_ok())
}

/// Whether packets' headers can be read; tried once for the process.
pub(crate) fn has_kernel_reads() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| kernel_reads().is_ok())
}

/// Calls `bpf_fentry_test1` so often: a function that does next to nothing, which the kernel keeps for its own tests.
pub(crate) fn call_test_function(times: usize) -> Trial {
    quietly(|| {
        let action = "having the kernel call its test function";
        let mut object: MaybeUninit<OpenObject> = MaybeUninit::uninit();
        let mut open = skel::features::FeaturesSkelBuilder::default()
            .open(&mut object)
            .map_err(|error| refused(action.to_owned(), &error))?;
        for mut prog in open.open_object_mut().progs_mut() {
            let wanted = prog.name() == "has_fentry";
            prog.set_autoload(wanted);
        }
        let skel = open.load().map_err(|error| refused(action.to_owned(), &error))?;
        for _ in 0..times {
            skel.progs
                .has_fentry
                .test_run(ProgramInput::default())
                .map_err(|error| refused(action.to_owned(), &error))?;
        }
        Ok(())
    })
}

/// Compare-and-swap, which the in-flight table needs.
pub(crate) fn atomics() -> Trial {
    feature("has_cmpxchg", "a BPF program", Until::Loaded)
}

/// The helper that reads any memory of the kernel, which lockdown keeps away. Only flows of packets need it.
pub(crate) fn kernel_reads() -> Trial {
    feature("has_kernel_reads", "a raw_tp program", Until::Loaded)
}

/// A ring buffer of this size.
pub(crate) fn ring_buffer(bytes: u32) -> Trial {
    let created = quietly(|| create_map(MapType::RingBuf, "dwell_trial", 0, 0, bytes, 0));
    created.map(drop).map_err(|error| refused("creating a ring buffer".to_owned(), &error))
}

/// Where the function tracer is switched off the kernel attaches programs all the same, and doesn't call them.
fn tracer_is_on() -> Trial {
    let is_off = kernel::function_tracer() == FunctionTracer::Off;
    if is_off { Err(Refusal { action: "using the function tracer".to_owned(), errno: EBUSY }) } else { Ok(()) }
}

fn feature(program: &str, what: &str, until: Until) -> Trial {
    quietly(|| attempt(skel::features::FeaturesSkelBuilder::default(), program, what, until))
}

fn quietly<T>(trial: impl FnOnce() -> T) -> T {
    messages::captured(trial).0
}

/// Loads this one of the object's programs, which is `what`, and no other.
fn attempt<B>(builder: B, program: &str, what: &str, until: Until) -> Trial
where
    B: for<'obj> SkelBuilder<'obj>,
{
    let loading = |error| refused(format!("loading {what}"), &error);
    let mut object: MaybeUninit<OpenObject> = MaybeUninit::uninit();
    let mut open = builder.open(&mut object).map_err(loading)?;
    for mut prog in open.open_object_mut().progs_mut() {
        let wanted = prog.name() == program;
        prog.set_autoload(wanted);
    }
    let mut skel = open.load().map_err(loading)?;
    if until == Until::Attached {
        let prog = skel.object_mut().progs_mut().find(|prog| prog.name() == program);
        let link = prog.map(|prog| prog.attach()).transpose();
        link.map_err(|error| refused(format!("attaching {what}"), &error))?;
    }
    Ok(())
}

fn refused(action: String, error: &libbpf_rs::Error) -> Refusal {
    Refusal { action, errno: errno(error) }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::ProgramType;

    use super::*;
    use crate::driver::span::{Step, at, explained};
    use crate::error::{Capability, ErrorKind};
    use crate::kernel::{self, Return, Signature, Tracepoint};
    use crate::plan::Site;

    const EACCES: i32 = 13;

    /// What the kernel's verifier rejects is an error that says what it has against it: here that a program follows an
    /// argument which, at a plain raw tracepoint, is a number.
    #[test]
    fn rejected_by_the_verifier() {
        let load = || {
            let mut object: MaybeUninit<OpenObject> = MaybeUninit::uninit();
            let mut open = skel::features::FeaturesSkelBuilder::default().open(&mut object)?;
            for mut prog in open.open_object_mut().progs_mut() {
                let wanted = prog.name() == "has_typed_tracepoint";
                prog.set_autoload(wanted);
                if wanted {
                    prog.set_prog_type(ProgramType::RawTracepoint);
                }
            }
            open.load().map(drop)
        };
        let signature = Signature { params: Vec::new(), ret: Return::Void, ret_points_to: None, variadic: false };
        let site = Site::Tracepoint(Tracepoint { name: "netif_receive_skb".into(), module: None, signature });
        let error = explained(&site, || load().map_err(at(Step::Load))).unwrap_err();
        let text = error.to_string();
        let ErrorKind::Rejected { hook, program, errno, verdict, log } = error.kind() else {
            // To be refused for another reason takes a process that may not load programs at all.
            assert!(kernel::lacks(Capability::Bpf) && kernel::lacks(Capability::SysAdmin), "{text}");
            return;
        };
        assert_eq!((&**hook, &**program, *errno), (&*site.to_string(), "has_typed_tracepoint", EACCES));
        assert!(verdict.contains("invalid mem access"), "{text}");
        assert!(text.ends_with(verdict) && text.lines().count() == 1, "{text}");
        assert!(log.contains(verdict) && (2..=64).contains(&log.len()), "{log:#?}");
        assert_eq!(error.hook(), Some(&*site.to_string()));
    }
}
