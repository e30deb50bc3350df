//! Attached spans, and what the kernel's refusals mean.

use std::sync::Arc;

use libbpf_rs::{Link, OpenProgramMut};

use super::room::Room;
use super::state::{Programs, Skipped, Snapshot, StateMaps};
use super::{E2BIG, EMFILE, ENFILE, ENOMEM, EPERM, ESRCH, Shared, call, errno, hook, messages, refusal, system_error};
use crate::error::{Capability, ENOTSUPP, Error, ErrorKind, NotTraceable};
use crate::kernel::{self, Function};
use crate::plan::{Body, SpanPlan};

/// An attached span. Dropping it detaches it.
#[derive(Debug)]
pub(crate) struct AttachedSpan {
    links: Vec<Link>,
    maps: Vec<Arc<StateMaps>>,
    programs: Arc<Programs>,
    index: usize,
}

/// What loading and attaching a part of a span came to.
pub(super) struct Part {
    pub(super) links: Vec<Link>,
    pub(super) maps: StateMaps,
}

/// Loads and attaches the span number `index`; on failure nothing of it is left.
pub(crate) fn attach(shared: &Shared, index: usize, plan: &SpanPlan, in_flight: u32) -> Result<AttachedSpan, Error> {
    let room = Room::new(in_flight, shared.store);
    let parts = match &plan.body {
        Body::Calls(calls) => {
            let attach = |(part, call)| call::attach(shared, (index, part), plan, call, &room);
            calls.iter().enumerate().map(attach).collect()
        }
        Body::Hooks(hooks) => hook::attach(shared, index, plan, hooks, &room).map(|part| vec![part]),
    };
    let parts: Vec<Part> = parts.inspect_err(|_| shared.programs.remove(index))?;
    let mut span = AttachedSpan { links: Vec::new(), maps: vec![], programs: Arc::clone(&shared.programs), index };
    for Part { links, maps } in parts {
        let maps = Arc::new(maps);
        shared.watch(&maps);
        span.links.extend(links);
        span.maps.push(maps);
    }
    Ok(span)
}

impl AttachedSpan {
    /// Detaches; what has been counted can still be read.
    pub(crate) fn detach(&mut self) {
        self.links.clear();
    }

    /// Its number in the probe.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// What the kernel has counted so far.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let skipped: Skipped = self.programs.skipped(self.index);
        Snapshot::take(self.maps.iter().map(Arc::as_ref), skipped)
    }
}

/// Where loading and attaching got to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Load,
    Attach,
}

#[derive(Debug)]
pub(super) struct Failure {
    pub(super) step: Step,
    pub(super) error: libbpf_rs::Error,
}

/// To say of a result how far it got.
pub(super) fn at(step: Step) -> impl Fn(libbpf_rs::Error) -> Failure {
    move |error| Failure { step, error }
}

/// Loads a program of an object, for this target, or leaves it out.
pub(super) fn choose(prog: &mut OpenProgramMut<'_>, target: Option<&str>) -> libbpf_rs::Result<()> {
    prog.set_autoload(target.is_some());
    match target {
        Some(target) => prog.set_attach_target(0, Some(target.to_owned())),
        None => Ok(()),
    }
}

/// Does what may fail, and makes an error of what the kernel and libbpf have to say to it.
pub(super) fn explained<T>(
    site: &str,
    function: Option<&Function>,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Error> {
    let (result, log) = messages::captured(work);
    result.map_err(|failure| explain(&failure, site, function, log))
}

/// Arguments that every kernel's trampolines can save on x86-64.
const CERTAIN_WORDS: u32 = 6;
/// How many of libbpf's lines an error keeps.
const LOG_LINES: usize = 20;

/// Makes of the kernel's errno what it means for this function, or, without one, for this tracepoint.
pub(super) fn explain(failure: &Failure, site: &str, function: Option<&Function>, mut log: Vec<String>) -> Error {
    let errno = errno(&failure.error);
    let words = function.map_or(0, |function| function.signature.words());
    let lacks_admin = function.is_some_and(|function| function.module.is_some()) && kernel::lacks(Capability::SysAdmin);
    let error: Error = match errno {
        // Before 6.6 there were trampolines for six registers only, and the same errno as for none at all.
        ENOTSUPP if words > CERTAIN_WORDS => Error::not_traceable(site, NotTraceable::TooManyArguments { words }),
        // A module's type information is a kernel object, and to open one takes CAP_SYS_ADMIN.
        EPERM | ESRCH if lacks_admin => Error::no_privilege(vec![Capability::SysAdmin]),
        EPERM | ENOTSUPP if function.is_none() => {
            refusal(errno).unwrap_or_else(|| system_error(&format!("attaching to `{site}`"), &failure.error))
        }
        EPERM | ENOTSUPP => {
            refusal(errno).unwrap_or_else(|| ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() }.into())
        }
        E2BIG if failure.step == Step::Attach => Error::not_traceable(site, NotTraceable::TooManyProbes),
        ENOMEM | ENFILE | EMFILE => {
            refusal(errno).unwrap_or_else(|| system_error(&format!("attaching to `{site}`"), &failure.error))
        }
        _ => {
            let known =
                function.and_then(|function| kernel::why_not_attached(function.module.as_deref(), &function.name));
            let reason = known.unwrap_or_else(|| {
                log.drain(..log.len().saturating_sub(LOG_LINES));
                NotTraceable::Refused { errno, log }
            });
            Error::not_traceable(site, reason)
        }
    };
    error.with_errno(errno)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::EINVAL;
    use crate::kernel::{Param, Return, Signature};

    fn explained(step: Step, errno: i32, words: usize) -> ErrorKind {
        let param = Param { name: String::new(), ty: "int".into(), words: 1, points_to: None };
        let function = Function {
            // In no kernel's symbols, so that these have no say.
            name: "no_such_function".into(),
            module: None,
            signature: Signature {
                params: vec![param; words],
                ret: Return::Void,
                ret_points_to: None,
                variadic: false,
            },
        };
        let failure = Failure { step, error: libbpf_rs::Error::from_raw_os_error(errno) };
        let log = (0..30).map(|n| format!("line {n}")).collect();
        let error = explain(&failure, "f", Some(&function), log);
        assert!(std::error::Error::source(&error).is_some(), "{error}");
        error.kind().clone()
    }

    fn reason(step: Step, errno: i32, words: usize) -> NotTraceable {
        match explained(step, errno, words) {
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
        for (step, errno) in [(Step::Load, EPERM), (Step::Attach, EPERM), (Step::Attach, ENOTSUPP)] {
            let kind = explained(step, errno, 4);
            assert_eq!(kind, ErrorKind::TracingRefused { errno, lockdown: kernel::lockdown() });
        }
        assert_eq!(reason(Step::Attach, ENOTSUPP, 8), NotTraceable::TooManyArguments { words: 8 });
        assert_eq!(reason(Step::Attach, E2BIG, 4), NotTraceable::TooManyProbes);
        for errno in [ENOMEM, ENFILE, EMFILE] {
            let action = "attaching to `f`".to_owned();
            assert_eq!(explained(Step::Load, errno, 4), ErrorKind::System { action, errno });
        }
        // The function isn't in kallsyms, if that can be read; the kernel's own answer, if not.
        let reason = reason(Step::Load, EINVAL, 4);
        match reason {
            NotTraceable::Inlined => {}
            NotTraceable::Refused { errno, log } => assert_eq!((errno, log.len(), &*log[19]), (EINVAL, 20, "line 29")),
            other => panic!("{other:?}"),
        }
    }
}
