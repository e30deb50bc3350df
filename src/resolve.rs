//! What a user asks for → what this kernel has for it.

mod stage;

use std::num::NonZero;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::events::Events;
use crate::filter::{Field, Filter, Test};
use crate::group::GroupBy;
use crate::hook::{Hook, Pick, Place};
use crate::kernel::{Function, Kernel, Param, Signature, Tracepoint};
use crate::name::Name;
use crate::plan::{Body, CallPlan, HookPlan, KeySource, NO_WORD, Role, Site, SpanPlan, SubjectPlan, SubjectSource};
use crate::span::{Key, Shape, Span};
use crate::wire::outcome;

/// What spans between hooks are bounded by, unless something else is asked for.
const DEFAULT_MAX_AGE: Duration = Duration::from_secs(60);

/// Looks spans up in this kernel.
pub(crate) struct Resolver<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) access: Access,
    pub(crate) max_age: Option<Duration>,
    pub(crate) events: Events,
    /// Of all spans.
    pub(crate) filter: Option<&'a Filter>,
    /// Events tell whose packets they are about.
    pub(crate) identify: bool,
    /// And what the kernel was doing.
    pub(crate) stories: bool,
    pub(crate) inner_headers: bool,
    /// So many of the slowest are kept.
    pub(crate) slowest: Option<NonZero<u32>>,
}

/// What the kernel lets this process do, beyond plain raw tracepoints.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    /// Functions can be traced.
    pub(crate) functions: bool,
    /// Tracepoints' arguments can be followed; if not, their addresses are all there is.
    pub(crate) types: bool,
    /// Packets' headers can be read.
    pub(crate) headers: bool,
}

impl Access {
    /// What a kernel has, whatever it lets this process do with it.
    pub(crate) const ALL: Self = Self { functions: true, types: true, headers: true };
}

impl<'a> Resolver<'a> {
    /// With nothing asked for but what is the default.
    pub(crate) fn new(kernel: &'a Kernel, access: Access) -> Self {
        Self {
            kernel,
            access,
            max_age: None,
            events: Events::All,
            filter: None,
            identify: false,
            stories: false,
            inner_headers: false,
            slowest: None,
        }
    }

    pub(crate) fn span(&self, span: &Span) -> Result<SpanPlan, Error> {
        let (key, body) = match &span.shape {
            Shape::Function(name) => (Key::Call, self.calls(name)?),
            Shape::Between { from, to, key: Key::Call } => (Key::Call, self.calls(only_call(from, to)?)?),
            Shape::Between { from, to, key } => (*key, Body::Hooks(self.hooks(from, to, *key)?)),
            Shape::Stage(stage) => self.stage(*stage)?,
        };
        if let Some(by) = span.group_by {
            self.check_group(&body, by)?;
        }
        let filter = Filter::all([self.filter.cloned(), span.filter.clone()]);
        let tests = filter.as_ref().map_or(Ok(Vec::new()), Filter::compile)?;
        let has_pcap = tests.iter().any(|test| test.field == Field::Pcap);
        let pcap = filter.filter(|_| has_pcap).map_or(Vec::new(), |filter| filter.instructions());
        self.check_filter(&body, &tests)?;
        let events = span.events.unwrap_or(self.events);
        let default = match body {
            Body::Calls(_) => None,
            Body::Hooks(_) => Some(DEFAULT_MAX_AGE),
        };
        let (lives_are_seen, late) = match &body {
            Body::Hooks(hooks) => (sees_lives(hooks, key), hooks.iter().any(|hook| hook.late)),
            Body::Calls(_) => (true, false),
        };
        let makes_records = events.are_wanted() || self.slowest.is_some();
        let identified = self.identify && makes_records && is_readable(&body);
        let guard_head = !lives_are_seen && key == Key::Skb && self.access.types && !late;
        Ok(SpanPlan {
            name: Name::from(&*span.display_name()),
            key,
            body,
            restart: span.restart,
            max_age: span.max_age.or(self.max_age).or(default),
            with_abandoned: span.with_abandoned,
            events,
            group_by: span.group_by,
            max_groups: span.max_groups as u32,
            slowest: self.slowest,
            tests,
            pcap,
            identified,
            told: self.stories && makes_records,
            inner_headers: self.inner_headers,
            lives_are_seen,
            guard_head,
        })
    }

    fn calls(&self, name: &str) -> Result<Body, Error> {
        let function = self.kernel.function(name)?;
        Ok(Body::Calls(vec![CallPlan::new(function)]))
    }

    fn hooks(&self, from: &[Hook], to: &[Hook], key: Key) -> Result<Vec<HookPlan>, Error> {
        let mut hooks = Vec::new();
        for (group, role) in [(from, Role::Start), (to, Role::End)] {
            for hook in group {
                hooks.push(self.hook(hook, key, role)?);
            }
        }
        if let Some(both) =
            hooks.iter().enumerate().find(|(n, hook)| hooks[..*n].iter().any(|other| other.site == hook.site))
        {
            let reason = format!("`{}` is named twice: a span starts and ends at different hooks", both.1.site);
            return Err(Error::config("span", reason));
        }
        Ok(self.with_releases(hooks, key))
    }

    fn with_releases(&self, mut hooks: Vec<HookPlan>, key: Key) -> Vec<HookPlan> {
        for release in self.releases(key) {
            // Where a life ends is a place to measure, too: then the span ends there as it was asked to.
            if !hooks.iter().any(|hook| hook.site == release.site) {
                hooks.push(release);
            }
        }
        hooks
    }

    fn hook(&self, hook: &Hook, key: Key, role: Role) -> Result<HookPlan, Error> {
        let site = match hook.place {
            Place::Entry => Site::Entry(self.kernel.function(&hook.name)?),
            Place::Exit => Site::Exit(self.kernel.function(&hook.name)?),
            Place::Tracepoint => Site::Tracepoint(self.kernel.tracepoint(&hook.name)?),
        };
        let (source, key_word) = key_source(hook, key, site.signature())?;
        let returned = hook.place == Place::Exit && key_word == site.signature().words();
        let late = is_late(hook) && !returned;
        if source.needs_types() && !self.access.types && hook.place == Place::Tracepoint {
            return Err(ErrorKind::NoTypes { hook: hook.to_string(), key: key.to_string() }.into());
        }
        if source == KeySource::FlowSkb && !self.access.headers {
            return Err(ErrorKind::NoHeaders { hook: hook.to_string() }.into());
        }
        // What the packet's address is worth at the other hooks doesn't depend on the key.
        let skb_word = match (source, key) {
            (KeySource::Address, Key::Skb) => Some(key_word),
            _ => skb_word(site.signature()),
        };
        let reversed = key == Key::FlowReply && role == Role::End;
        let readable = role == Role::Start && !late && (self.access.types || hook.place != Place::Tracepoint);
        let subject = if readable { subject(site.signature()) } else { SubjectPlan::NOTHING };
        Ok(HookPlan { site, role, source, key_word, skb_word, reversed, late, subject })
    }

    /// Whether what the starts are grouped by can be read where they are.
    fn check_group(&self, body: &Body, by: GroupBy) -> Result<(), Error> {
        if by == GroupBy::Cpu {
            return Ok(());
        }
        let check = |hook: &str, signature: &Signature, subject: SubjectPlan| -> Result<(), Error> {
            if !subject.is_of_network() {
                return Err(no_key(hook, described(Key::Flow), signature));
            }
            if subject.source == SubjectSource::Skb && by != GroupBy::Interface && !self.access.headers {
                let reason = "this kernel keeps programs from reading packets' headers, as it does when it is locked down \
                              (confidentiality)";
                return Err(ErrorKind::NotGrouped { hook: hook.to_owned(), by, reason }.into());
            }
            Ok(())
        };
        match body {
            Body::Calls(calls) => calls.iter().try_for_each(|CallPlan { function, subject, .. }| {
                check(&function.to_string(), &function.signature, *subject)
            }),
            Body::Hooks(hooks) => hooks.iter().filter(|hook| hook.role == Role::Start).try_for_each(|hook| {
                let name = hook.site.to_string();
                if hook.is_tracepoint() && !self.access.types {
                    let reason = "this kernel refuses typed tracepoints, so packets can't be read";
                    return Err(ErrorKind::NotGrouped { hook: name, by, reason }.into());
                }
                if hook.late {
                    let what = "a packet that is sure to be still there";
                    return Err(no_key(&name, what, hook.site.signature()));
                }
                check(&name, hook.site.signature(), hook.subject)
            }),
        }
    }

    /// Whether what the starts are filtered by can be read where they are.
    fn check_filter(&self, body: &Body, tests: &[Test]) -> Result<(), Error> {
        let starts: Vec<(String, SubjectPlan)> = match body {
            Body::Calls(calls) => calls.iter().map(|call| (call.function.to_string(), call.subject)).collect(),
            Body::Hooks(hooks) => {
                let starts = hooks.iter().filter(|hook| hook.role == Role::Start);
                starts.map(|hook| (hook.site.to_string(), hook.subject)).collect()
            }
        };
        for (hook, subject) in starts {
            for test in tests {
                if let Some(reason) = self.why_not_filtered(subject.source, test.field) {
                    return Err(ErrorKind::NotFiltered { hook, by: test.field.name(), reason }.into());
                }
            }
        }
        Ok(())
    }

    fn why_not_filtered(&self, subject: SubjectSource, by: Field) -> Option<&'static str> {
        const NO_PACKET: &str = "it has no argument that is a packet (struct sk_buff *)";
        const NEITHER: &str = "it has no argument that is a packet (struct sk_buff *) or a socket";
        const UNREADABLE: &str =
            "its packet may be gone, or this kernel refuses typed tracepoints, so it can't be read";
        const LOCKED: &str =
            "this kernel keeps programs from reading its memory, as it does when it is locked down (confidentiality)";
        let of_thread = matches!(by, Field::Pid | Field::Tid | Field::Comm);
        let of_packet = matches!(by, Field::Length | Field::Interface | Field::ReceiveInterface | Field::Pcap);
        let reads_memory = match subject {
            SubjectSource::Skb => by == Field::Pcap || !of_packet && !matches!(by, Field::Mark | Field::Netns),
            _ => by == Field::Cgroup,
        };
        match subject {
            _ if of_thread => None,
            SubjectSource::Nothing => Some(UNREADABLE),
            SubjectSource::Task if by != Field::Cgroup => Some(NEITHER),
            SubjectSource::Sock | SubjectSource::Socket if of_packet => Some(NO_PACKET),
            _ if reads_memory && !self.access.headers => Some(LOCKED),
            _ => None,
        }
    }

    /// The hooks at which what a key stands for ends; those that this kernel has.
    ///
    /// A packet passes two of them, so that it is still seen to go if the kernel skips one of the programs.
    fn releases(&self, key: Key) -> Vec<HookPlan> {
        let went = |outcome| Role::Abandon { outcome, reason_word: None, location_word: None };
        let released = went(outcome::RELEASED);
        let entry = |name| self.release(Hook::entry(name), key, released);
        let tracepoint = |name, role| self.release(Hook::tracepoint(name), key, role);
        let found = match key {
            // The tracepoints say why. Not every way to free a packet passes them; the others pass __kfree_skb() and
            // skb_release_head_state(), but for datagrams that were read. GRO has ways of its own to take a packet apart.
            Key::Skb => vec![
                self.dropped(key),
                tracepoint("consume_skb", went(outcome::CONSUMED)),
                entry("__kfree_skb"),
                entry("__consume_stateless_skb"),
                entry("skb_release_head_state"),
                entry("napi_skb_free_stolen_head"),
                entry("napi_reuse_skb"),
            ],
            // Data is freed, handed on, or left for new one. Where skb_free_head() was inlined, the first clone that lets
            // go ends it: that is too early, but not wrong.
            Key::SkbHead => vec![
                entry("skb_free_head").or_else(|| entry("skb_release_data")),
                entry("pskb_expand_head"),
                entry("napi_skb_free_stolen_head"),
                entry("napi_reuse_skb"),
                entry("kfree_skb_partial"),
            ],
            // The first is called whoever frees it, and can't have been inlined.
            Key::Sock => vec![
                entry("security_sk_free")
                    .or_else(|| entry("sk_destruct"))
                    .or_else(|| tracepoint("tcp_destroy_sock", released)),
            ],
            Key::Thread => vec![tracepoint("sched_process_exit", released)],
            Key::Call | Key::Flow | Key::FlowReply => vec![],
        };
        found.into_iter().flatten().collect()
    }

    /// Where a life ends: resolved as any hook is, and left out where it can't be had.
    fn release(&self, hook: Hook, key: Key, role: Role) -> Option<HookPlan> {
        if hook.place != Place::Tracepoint && !self.access.functions {
            return None;
        }
        self.hook(&hook, key, role).ok()
    }

    fn dropped(&self, key: Key) -> Option<HookPlan> {
        let role = |reason_word, location_word| Role::Abandon { outcome: outcome::DROPPED, reason_word, location_word };
        let mut hook = self.release(Hook::tracepoint("kfree_skb"), key, role(None, None))?;
        let signature = hook.site.signature();
        let word = |is_it: fn(&Param) -> bool| signature.params.iter().position(is_it).map(|n| signature.word_of(n));
        let reason = word(|param| param.ty == "enum skb_drop_reason");
        let location = word(|param| param.name == "location");
        hook.role = role(reason, location);
        Some(hook)
    }
}

/// Whether anything can be said of what it starts with.
fn is_readable(body: &Body) -> bool {
    match body {
        Body::Calls(_) => true,
        Body::Hooks(hooks) => hooks.iter().any(|hook| hook.subject != SubjectPlan::NOTHING),
    }
}

/// Whether the function is among the hooks that all packets, or all sockets, pass when they go.
fn sees_lives(hooks: &[HookPlan], key: Key) -> bool {
    let universal: &[&str] = match key {
        Key::Skb => &["__kfree_skb"],
        Key::SkbHead => &["skb_free_head", "skb_release_data"],
        Key::Sock => &["security_sk_free", "sk_destruct"],
        Key::Call | Key::Flow | Key::FlowReply | Key::Thread => return true,
    };
    hooks.iter().any(|hook| matches!(&hook.site, Site::Entry(function) if universal.contains(&&*function.name)))
}

impl CallPlan {
    fn new(function: Function) -> Self {
        let (skb_word, subject) = (skb_word(&function.signature), subject(&function.signature));
        Self { function, skb_word, condition: None, subject }
    }
}

impl Site {
    fn signature(&self) -> &Signature {
        match self {
            Self::Entry(Function { signature, .. }) | Self::Exit(Function { signature, .. }) => signature,
            Self::Tracepoint(Tracepoint { signature, .. }) => signature,
        }
    }
}

/// The function of a span by hooks that is keyed by the call.
fn only_call<'a>(from: &'a [Hook], to: &[Hook]) -> Result<&'a str, Error> {
    match (from, to) {
        ([from], [to]) if from.place == Place::Entry && to.place == Place::Exit && from.name == to.name => {
            Ok(&from.name)
        }
        _ => Err(Error::config(
            "keyed_by",
            "a call goes from the entry of a function to the exit of the same: `Span::function` measures that",
        )),
    }
}

fn skb_word(signature: &Signature) -> Option<u32> {
    pointer_word(signature, "sk_buff")
}

/// The first argument that points to such a struct.
fn pointer_word(signature: &Signature, name: &str) -> Option<u32> {
    let position = signature.params.iter().position(|param| param.points_to.as_deref() == Some(name));
    position.map(|n| signature.word_of(n))
}

/// A packet, which tells more, or else a socket.
fn subject(signature: &Signature) -> SubjectPlan {
    const SOCKS: [&str; 5] = ["sock", "tcp_sock", "udp_sock", "inet_sock", "inet_connection_sock"];
    let word = |name| pointer_word(signature, name);
    let sock_word = SOCKS.into_iter().find_map(word);
    let found = |source, word| SubjectPlan { source, word, sock_word: NO_WORD };
    if let Some(word) = word("sk_buff") {
        return SubjectPlan { sock_word: sock_word.unwrap_or(NO_WORD), ..found(SubjectSource::Skb, word) };
    }
    sock_word
        .map(|word| found(SubjectSource::Sock, word))
        .or_else(|| word("socket").map(|word| found(SubjectSource::Socket, word)))
        .unwrap_or(found(SubjectSource::Task, NO_WORD))
}

/// What can carry a key: the struct that an argument points to, and how the key is made of that.
fn carriers(key: Key) -> &'static [(&'static str, KeySource)] {
    match key {
        Key::Call | Key::Thread => &[],
        Key::Skb => &[("sk_buff", KeySource::Address)],
        Key::SkbHead => &[("sk_buff", KeySource::SkbHead)],
        // The larger sockets begin with a struct sock.
        Key::Sock => &[
            ("sock", KeySource::Address),
            ("tcp_sock", KeySource::Address),
            ("udp_sock", KeySource::Address),
            ("inet_sock", KeySource::Address),
            ("inet_connection_sock", KeySource::Address),
            ("socket", KeySource::SocketSock),
            ("sk_buff", KeySource::SkbSock),
        ],
        Key::Flow | Key::FlowReply => &[
            ("sk_buff", KeySource::FlowSkb),
            ("sock", KeySource::FlowSock),
            ("tcp_sock", KeySource::FlowSock),
            ("udp_sock", KeySource::FlowSock),
            ("inet_sock", KeySource::FlowSock),
            ("inet_connection_sock", KeySource::FlowSock),
            ("socket", KeySource::FlowSocket),
        ],
    }
}

fn described(key: Key) -> &'static str {
    match key {
        Key::Call | Key::Thread => "anything",
        Key::Skb | Key::SkbHead => "a packet (struct sk_buff *)",
        Key::Sock => "a socket (struct sock *, struct socket *) or a packet (struct sk_buff *)",
        Key::Flow | Key::FlowReply => "a packet (struct sk_buff *) or a socket (struct sock *, struct socket *)",
    }
}

/// Tracepoints that get a packet which may have been freed, and its address used again.
const AFTER_THE_PACKET: [&str; 1] = ["net_dev_xmit"];

/// Whether a packet among the arguments may be gone there.
fn is_late(hook: &Hook) -> bool {
    match hook.place {
        Place::Entry => false,
        Place::Exit => true,
        Place::Tracepoint => AFTER_THE_PACKET.contains(&&*hook.name),
    }
}

/// What the key is made of at a hook, and the word of the context for it.
fn key_source(hook: &Hook, key: Key, signature: &Signature) -> Result<(KeySource, u32), Error> {
    if key == Key::Thread {
        return Ok((KeySource::Thread, 0));
    }
    let carrier = |points_to: &Option<String>| {
        let name = points_to.as_deref()?;
        carriers(key).iter().find(|(carrier, _)| *carrier == name).map(|(_, source)| *source)
    };
    let is_exit = hook.place == Place::Exit;
    let is_late = is_late(hook);
    let argument = |n: usize| Some((carrier(&signature.params.get(n)?.points_to)?, signature.word_of(n)));
    // A packet's address may be another packet's by then, and what it points to mean nothing.
    let is_gone = |source: KeySource| is_late && (key.is_packet() || source.reads_packet());
    let returned = || Some((carrier(&signature.ret_points_to)?, signature.words()));
    let found = match hook.pick {
        // Who names the argument knows that the packet is still there; but it isn't read on anybody's word.
        Pick::Argument(n) => argument(n).filter(|(source, _)| !(is_late && source.reads_packet())),
        Pick::Returned => returned(),
        Pick::Found => {
            // In the carriers' order: a socket of its own rather than the packet's.
            let rank = |source: KeySource| carriers(key).iter().position(|(_, other)| *other == source);
            let arguments = (0..signature.params.len()).filter_map(argument).filter(|(source, _)| !is_gone(*source));
            let argument = arguments.min_by_key(|(source, _)| rank(*source));
            if is_exit { argument.or_else(returned) } else { argument }
        }
    };
    found.ok_or_else(|| {
        let what = match hook.pick {
            Pick::Returned => "returned and could be the key",
            Pick::Argument(n) if argument(n).is_some() => "a packet that can be read there",
            Pick::Argument(_) => "the one that was chosen and could be the key",
            Pick::Found if (0..signature.params.len()).any(|n| argument(n).is_some()) => {
                "a packet that is sure to be still there (choose one with `argument()` if you know that it is)"
            }
            Pick::Found => described(key),
        };
        no_key(&hook.to_string(), what, signature)
    })
}

fn no_key(hook: &str, key: &'static str, signature: &Signature) -> Error {
    let arguments = signature.params.iter().map(ToString::to_string).collect();
    ErrorKind::NoKey { hook: hook.to_owned(), key, arguments }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resolves on the kernel that runs the test; `None` where it has no BTF, which the test says.
    fn resolve(access: Access, span: &Span) -> Option<Result<SpanPlan, Error>> {
        let Ok(kernel) = Kernel::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return None;
        };
        Some(Resolver::new(&kernel, access).span(span))
    }

    fn hooks(plan: &SpanPlan) -> &[HookPlan] {
        match &plan.body {
            Body::Hooks(hooks) => hooks,
            Body::Calls(_) => panic!("{plan:?}"),
        }
    }

    fn sources(span: &Span) -> Vec<(KeySource, u32)> {
        let Some(plan) = resolve(Access::ALL, span) else { return vec![] };
        let plan = plan.unwrap();
        let ends = hooks(&plan).iter().filter(|hook| !matches!(hook.role, Role::Abandon { .. }));
        ends.map(|hook| (hook.source, hook.key_word)).collect()
    }

    /// The argument that carries the key is found by its type, a socket of its own before a packet's.
    #[test]
    fn finds_keys() {
        // tcp_v4_do_rcv(struct sock *sk, struct sk_buff *skb), inet_sendmsg(struct socket *sock, ...)
        let span = || Span::between(Hook::entry("tcp_v4_do_rcv"), Hook::entry("inet_sendmsg"));
        let expect = |key, from, to| {
            let sources = sources(&span().keyed_by(key));
            assert!(sources.is_empty() || sources == [from, to], "{key} {sources:?}");
        };
        expect(Key::Sock, (KeySource::Address, 0), (KeySource::SocketSock, 0));
        expect(Key::Flow, (KeySource::FlowSkb, 1), (KeySource::FlowSocket, 0));
        let skb = sources(&Span::between(Hook::entry("tcp_v4_do_rcv"), Hook::tracepoint("net_dev_start_xmit")));
        assert!(skb.is_empty() || skb == [(KeySource::Address, 1), (KeySource::Address, 0)], "{skb:?}");
    }

    /// At an exit a packet counts if it is returned or named, and a socket as ever.
    #[test]
    fn keys_at_exits() {
        let exit = |hook: Hook, key| sources(&Span::between(Hook::entry("udp_queue_rcv_skb"), hook).keyed_by(key));
        // struct sk_buff *ip_rcv_core(struct sk_buff *skb, struct net *net)
        let returned = exit(Hook::exit("ip_rcv_core"), Key::Skb);
        assert!(returned.is_empty() || returned[1] == (KeySource::Address, 2), "{returned:?}");
        let named = exit(Hook::exit("udp_queue_rcv_one_skb").argument(1), Key::Skb);
        assert!(named.is_empty() || named[1] == (KeySource::Address, 1), "{named:?}");
        let sock = exit(Hook::exit("udp_queue_rcv_one_skb"), Key::Sock);
        assert!(sock.is_empty() || sock[1] == (KeySource::Address, 0), "{sock:?}");

        let span = Span::between(Hook::entry("udp_queue_rcv_skb"), Hook::exit("udp_queue_rcv_one_skb"));
        let Some(refused) = resolve(Access::ALL, &span) else { return };
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("`udp_queue_rcv_one_skb:exit`") && error.contains("sure to be still there"), "{error}");
        let read = Span::between(Hook::entry("udp_queue_rcv_skb"), Hook::exit("udp_queue_rcv_one_skb").argument(1));
        assert!(resolve(Access::ALL, &read.keyed_by(Key::SkbHead)).unwrap().is_err(), "nothing is read from it");
    }

    /// A packet passes two hooks where it goes, one where only tracepoints can be had; the span says which it is.
    #[test]
    fn lives() {
        let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
        let Some(plan) = resolve(Access::ALL, &span) else { return };
        let plan = plan.unwrap();
        let releases = |plan: &SpanPlan| -> Vec<String> {
            let releases = hooks(plan).iter().filter(|hook| matches!(hook.role, Role::Abandon { .. }));
            releases.map(|hook| hook.site.to_string()).collect()
        };
        let all = releases(&plan);
        assert!(all.contains(&"tp:kfree_skb".to_owned()) && all.contains(&"__kfree_skb".to_owned()), "{all:?}");
        assert!(plan.lives_are_seen && !plan.guard_head);
        // void kfree_skb(struct sk_buff *skb, void *location, ...)
        let words = hooks(&plan).iter().filter_map(|hook| match hook.role {
            Role::Abandon { outcome: outcome::DROPPED, location_word, .. } => Some((location_word, hook.return_word())),
            _ => None,
        });
        assert_eq!(words.collect::<Vec<_>>(), [(Some(1), Some(1))]);
        let plan = resolve(Access { functions: false, types: true, headers: true }, &span).unwrap().unwrap();
        assert_eq!(releases(&plan), ["tp:kfree_skb", "tp:consume_skb"]);
        assert!(!plan.lives_are_seen && plan.guard_head);
        let plan = resolve(Access { functions: false, types: false, headers: false }, &span).unwrap().unwrap();
        assert!(!plan.lives_are_seen && !plan.guard_head);
        // Where it is measured to, it doesn't end early.
        let dropped = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("kfree_skb"));
        let plan = resolve(Access::ALL, &dropped).unwrap().unwrap();
        assert!(!releases(&plan).contains(&"tp:kfree_skb".to_owned()));
    }

    /// What needs types isn't asked of tracepoints that have none.
    #[test]
    fn without_types() {
        let span =
            |key| Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb")).keyed_by(key);
        let plain = Access { functions: false, types: false, headers: false };
        for key in [Key::SkbHead, Key::Flow, Key::FlowReply, Key::Sock] {
            let Some(refused) = resolve(plain, &span(key)) else { return };
            assert!(matches!(refused.unwrap_err().kind(), ErrorKind::NoTypes { .. }), "{key}");
        }
        assert!(resolve(plain, &span(Key::Thread)).unwrap().is_ok());
        let grouped = |by| resolve(plain, &span(Key::Skb).grouped_by(by)).unwrap();
        let refused = grouped(GroupBy::Interface).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::NotGrouped { by: GroupBy::Interface, .. }), "{refused}");
        assert!(grouped(GroupBy::Cpu).is_ok());
    }

    /// Where headers can't be read, a packet has no flow, but a socket has.
    #[test]
    fn without_headers() {
        let access = Access { functions: true, types: true, headers: false };
        let by = |hook| Span::between(hook, Hook::entry("udp_recvmsg")).keyed_by(Key::Flow);
        let Some(refused) = resolve(access, &by(Hook::tracepoint("net_dev_queue"))) else { return };
        assert!(matches!(refused.unwrap_err().kind(), ErrorKind::NoHeaders { .. }));
        assert!(resolve(access, &by(Hook::entry("udp_sendmsg"))).unwrap().is_ok());
        let grouped = |by| resolve(access, &Span::function("ip_rcv").grouped_by(by)).unwrap();
        let refused = grouped(GroupBy::Protocol).unwrap_err();
        assert!(refused.to_string().contains("can't be grouped by protocol here"), "{refused}");
        assert!(grouped(GroupBy::Interface).is_ok());
    }

    /// A call's entry and exit are a span of the function; nothing else is keyed by the call.
    #[test]
    fn calls() {
        let span = |to| Span::between(Hook::entry("ip_rcv"), to).keyed_by(Key::Call);
        let Some(plan) = resolve(Access::ALL, &span(Hook::exit("ip_rcv"))) else { return };
        assert!(matches!(plan.unwrap().body, Body::Calls(calls) if calls.len() == 1));
        let error = resolve(Access::ALL, &span(Hook::exit("ip_rcv_core"))).unwrap().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Config { .. }), "{error}");
    }
}
