//! A stage → what this kernel has for it.

use super::{Resolver, no_key, pointer_word};
use crate::error::{Error, ErrorKind, NotTraceable};
use crate::hook::Hook;
use crate::kernel::Function;
use crate::plan::{Body, CallPlan, Condition, ConditionKind, HookPlan, Role};
use crate::span::Key;
use crate::stage::recipe::{self, Call, Parts, Point, Recipe, Which};
use crate::stage::{Stage, StagePlan};

/// Why something that was looked for can't be had.
enum Why {
    /// There is no function of the name. To find out more takes long, and may not be asked for.
    Unknown(&'static str),
    Error(Error),
}

impl Resolver<'_> {
    /// What is to be attached for a stage.
    pub(super) fn stage(&self, stage: Stage) -> Result<(Key, Body), Error> {
        let (key, body, _) = self.assemble(stage)?;
        let Body::Hooks(hooks) = body else { return Ok((key, body)) };
        Ok((key, Body::Hooks(self.with_releases(hooks, key))))
    }

    /// The same, described.
    pub(crate) fn stage_plan(&self, stage: Stage) -> Result<StagePlan, Error> {
        let (key, body, missing) = self.assemble(stage)?;
        let missing = missing.iter().map(|why| self.explain(why)).collect();
        let mut plan = StagePlan { stage, key, starts: vec![], ends: vec![], only: None, missing };
        match &body {
            Body::Calls(calls) => {
                plan.starts = calls.iter().map(|call| call.function.to_string()).collect();
                plan.ends = plan.starts.iter().map(|function| format!("{function}:exit")).collect();
                plan.only = calls.iter().find_map(|call| call.condition).map(|condition| only(condition.what));
            }
            Body::Hooks(hooks) => {
                for hook in hooks {
                    let list = if hook.role == Role::Start { &mut plan.starts } else { &mut plan.ends };
                    list.push(hook.site.to_string());
                }
            }
        }
        Ok(plan)
    }

    fn assemble(&self, stage: Stage) -> Result<(Key, Body, Vec<Why>), Error> {
        let mut missing = Vec::new();
        let (key, body) = match Recipe::of(stage) {
            Recipe::Calls(parts) => {
                let calls = self.parts(stage, parts, &mut missing, |call| self.call(call))?;
                (Key::Call, Body::Calls(calls))
            }
            Recipe::Between { from, to, key } => {
                let mut hooks = Vec::new();
                for (parts, role) in [(from, Role::Start), (to, Role::End)] {
                    hooks.extend(self.parts(stage, parts, &mut missing, |point| self.point(point, key, role))?);
                }
                (key, Body::Hooks(hooks))
            }
        };
        Ok((key, body, missing))
    }

    /// The first of each part that can be had. Where no part has one, nothing can stand for the stage.
    fn parts<T: Copy, P>(
        &self,
        stage: Stage,
        parts: Parts<T>,
        missing: &mut Vec<Why>,
        plan: impl Fn(T) -> Result<P, Why>,
    ) -> Result<Vec<P>, Error> {
        let mut plans = Vec::new();
        for &part in parts {
            let mut failed = Vec::new();
            let found = part.iter().find_map(|&candidate| plan(candidate).map_err(|why| failed.push(why)).ok());
            match found {
                Some(plan) => plans.push(plan),
                None => missing.extend(failed),
            }
        }
        if plans.is_empty() {
            let reasons = missing.iter().map(|why| self.explain(why)).collect();
            return Err(ErrorKind::StageUnavailable { stage, reasons }.into());
        }
        Ok(plans)
    }

    fn call(&self, Call(name, which): Call) -> Result<CallPlan, Why> {
        let function = self.find(name)?;
        let plan = CallPlan::new(function);
        let signature = &plan.function.signature;
        let (what, word, needed) = match which {
            Which::All => return Ok(plan),
            Which::Ingress => (ConditionKind::TcIngress, plan.skb_word, "a packet (struct sk_buff *)"),
            Which::Egress => (ConditionKind::TcEgress, plan.skb_word, "a packet (struct sk_buff *)"),
            Which::Hook(hook) => {
                let word = pointer_word(signature, "nf_hook_state");
                (ConditionKind::NfHook(hook), word, "a struct nf_hook_state *")
            }
        };
        match word {
            Some(word) => Ok(CallPlan { condition: Some(Condition { what, word }), ..plan }),
            None => Err(Why::Error(no_key(name, needed, signature))),
        }
    }

    fn point(&self, point: Point, key: Key, role: Role) -> Result<HookPlan, Why> {
        let function = |name| self.find(name).map(|function| function.to_string());
        let hook = match point {
            Point::Entry(name) => Hook::entry(function(name)?),
            Point::Argument(name, index) => Hook::entry(function(name)?).argument(index),
            Point::Returned(name) => Hook::exit(function(name)?).returned(),
            Point::Tracepoint(name) => Hook::tracepoint(name),
        };
        self.hook(&hook, key, role).map_err(Why::Error)
    }

    /// A function of the kernel itself, or else of the module that is named.
    fn find(&self, name: &'static str) -> Result<Function, Why> {
        let bare = name.rsplit(':').next().unwrap_or(name);
        if self.kernel.knows_in_kernel(bare) {
            return self.kernel.function(bare).map_err(Why::Error);
        }
        if bare == name {
            return Err(Why::Unknown(bare));
        }
        self.kernel.function(name).map_err(|error| match error.kind() {
            ErrorKind::NotTraceable { reason: NotTraceable::ModuleBuiltIn { .. }, .. } => Why::Unknown(bare),
            _ => Why::Error(error),
        })
    }

    fn explain(&self, why: &Why) -> String {
        match why {
            Why::Error(error) => error.to_string(),
            Why::Unknown(function) => match self.kernel.function(function) {
                Err(error) => error.to_string(),
                Ok(function) => format!("`{function}` is another module's"),
            },
        }
    }
}

fn only(what: ConditionKind) -> &'static str {
    match what {
        ConditionKind::TcIngress => "for packets that come in",
        ConditionKind::TcEgress => "for packets that go out",
        ConditionKind::NfHook(recipe::PRE_ROUTING) => "at pre-routing",
        ConditionKind::NfHook(recipe::LOCAL_IN) => "at local-in",
        ConditionKind::NfHook(recipe::FORWARD) => "at forward",
        ConditionKind::NfHook(recipe::LOCAL_OUT) => "at local-out",
        ConditionKind::NfHook(_) => "at post-routing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;
    use crate::resolve::Access;

    /// On the kernel that runs the test: what the kernel has, what a module would have, and what there isn't.
    #[test]
    fn finds_or_explains() {
        let Ok(kernel) = Kernel::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return;
        };
        let resolver = Resolver::new(&kernel, Access::ALL);
        // The module it is in where it isn't part of the kernel doesn't matter.
        for name in ["ip_rcv", "ip:ip_rcv"] {
            let Ok(function) = resolver.find(name) else { panic!("{name}") };
            assert_eq!(function.to_string(), "ip_rcv");
        }
        for (name, said) in [("no_such_function", "`no_such_function`"), ("no_such_module:f", "`no_such_module")] {
            let Err(why) = resolver.find(name) else { panic!("{name}") };
            let text = resolver.explain(&why);
            assert!(text.contains(said), "{text}");
        }
        let Err(why) = resolver.call(Call("tcp_v4_rcv", Which::Hook(0))) else { panic!("it has no such argument") };
        let text = resolver.explain(&why);
        assert!(text.starts_with("`tcp_v4_rcv` has no argument that is a struct nf_hook_state *; it has: "), "{text}");
    }

    /// Where there is none of any part, each reason is told; where there is one, the others are what is missing.
    #[test]
    fn needs_one_part() {
        let Ok(kernel) = Kernel::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return;
        };
        let resolver = Resolver::new(&kernel, Access::ALL);
        const PARTS: Parts<&str> = &[&["ip_rvc", "ipv6_rvc"], &["tcp_v4_rvc"], &["ip_rcv"]];
        let mut missing = vec![];
        let found = resolver.parts(Stage::Gro, PARTS, &mut missing, |name| resolver.find(name)).unwrap();
        assert_eq!((found.len(), found[0].to_string().as_str(), missing.len()), (1, "ip_rcv", 3));

        let error = resolver.parts(Stage::Gro, &PARTS[..2], &mut vec![], |name| resolver.find(name)).unwrap_err();
        match error.kind() {
            ErrorKind::StageUnavailable { stage: Stage::Gro, reasons } => {
                assert_eq!(reasons.len(), 3, "{reasons:?}");
                assert!(reasons[2].contains("did you mean `tcp_v4_rcv`"), "{reasons:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}
