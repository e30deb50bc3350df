//! What is to be attached: plain data, from the resolver to the driver.

use std::fmt;
use std::num::NonZero;
use std::time::Duration;

use crate::decode::More;
use crate::events::Events;
use crate::filter::{Instruction, Test};
use crate::group::GroupBy;
use crate::kernel::{Function, Return, Tracepoint};
use crate::name::Name;
use crate::span::{Key, Restart};

/// One span, resolved for this kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpanPlan {
    pub(crate) name: Name,
    pub(crate) key: Key,
    pub(crate) body: Body,
    pub(crate) restart: Restart,
    pub(crate) max_age: Option<Duration>,
    pub(crate) with_abandoned: bool,
    pub(crate) events: Events,
    pub(crate) group_by: Option<GroupBy>,
    pub(crate) max_groups: u32,
    /// So many of the slowest are kept.
    pub(crate) slowest: Option<NonZero<u32>>,
    /// Which starts are wanted; none of these: all.
    pub(crate) tests: Vec<Test>,
    /// The pcap expression, if one of them asks for it.
    pub(crate) pcap: Vec<Instruction>,
    /// Its events tell whose packets they are about.
    pub(crate) identified: bool,
    /// They tell what the kernel was doing as it ended.
    pub(crate) told: bool,
    /// Of packets within others, those are meant.
    pub(crate) inner_headers: bool,
    /// What the key stands for is seen to go whenever it does, or has no life that matters.
    pub(crate) lives_are_seen: bool,
    /// It isn't, so both ends must have the same data as well.
    pub(crate) guard_head: bool,
}

impl SpanPlan {
    /// Whether a pair of its hooks has to be looked at twice where the kernel skipped one of the programs. A packet passes
    /// two hooks where it goes, if functions are among them, so that one of them may be skipped.
    pub(crate) fn is_doubted(&self) -> bool {
        !(self.key == Key::Skb && self.lives_are_seen)
    }

    /// Whether what is completed makes records, as events or to be kept.
    pub(crate) fn makes_records(&self) -> bool {
        self.events.are_wanted() || self.slowest.is_some()
    }

    /// What its records have beside what all have.
    pub(crate) fn more(&self) -> More {
        More::new(self.key, self.identified, self.told)
    }

    /// Whether one thread meets both ends.
    pub(crate) fn has_same_thread(&self) -> bool {
        matches!(self.key, Key::Call | Key::Thread)
    }

    /// Whether starts have to find out what group they belong to.
    pub(crate) fn is_grouped(&self) -> bool {
        self.group_by.is_some_and(|by| by != GroupBy::Cpu)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Body {
    /// The calls of one function, or of several.
    Calls(Vec<CallPlan>),
    /// Hooks that a key connects.
    Hooks(Vec<HookPlan>),
}

impl Body {
    /// Where such a span may end, and what is returned there: all its hooks, so that their numbers are those of the ends.
    pub(crate) fn ends(&self) -> Vec<End<'_>> {
        match self {
            Self::Calls(calls) => {
                let functions = calls.iter().map(|call| &call.function);
                functions
                    .map(|function| End {
                        name: function.to_string(),
                        function: Some(function),
                        ret: function.signature.ret,
                    })
                    .collect()
            }
            Self::Hooks(hooks) => {
                let sites = hooks.iter().map(|hook| &hook.site);
                sites.map(|site| End { name: site.to_string(), function: site.function(), ret: site.ret() }).collect()
            }
        }
    }
}

/// A place where a span may end.
pub(crate) struct End<'a> {
    pub(crate) name: String,
    /// `None`: at a tracepoint.
    pub(crate) function: Option<&'a Function>,
    pub(crate) ret: Return,
}

/// The calls of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallPlan {
    pub(crate) function: Function,
    /// The word of the context that is a `struct sk_buff *`.
    pub(crate) skb_word: Option<u32>,
    pub(crate) condition: Option<Condition>,
    pub(crate) subject: SubjectPlan,
}

/// No word of a program's context, see `args.bpf.h`.
pub(crate) const NO_WORD: u32 = 13;

/// Where a start finds what it is about: whose packet it is, and what group it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubjectPlan {
    pub(crate) source: SubjectSource,
    /// The word of the context that it is, or [`NO_WORD`].
    pub(crate) word: u32,
    /// Of a packet, the word that is its socket, or [`NO_WORD`].
    pub(crate) sock_word: u32,
}

impl SubjectPlan {
    /// Nothing that could be read.
    pub(crate) const NOTHING: Self = Self { source: SubjectSource::Nothing, word: NO_WORD, sock_word: NO_WORD };

    /// Whether there is a packet or a socket.
    pub(crate) fn is_of_network(self) -> bool {
        self.word != NO_WORD
    }
}

/// `enum subject_source` in `packet.bpf.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum SubjectSource {
    Skb,
    Sock,
    Socket,
    /// There is neither packet nor socket: what can be said is said of the running task.
    Task,
    Nothing,
}

/// Which calls are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) what: ConditionKind,
    /// The word of the context that it is about.
    pub(crate) word: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConditionKind {
    TcIngress,
    TcEgress,
    /// One of the kernel's `NF_INET_...`.
    NfHook(u32),
}

/// One hook of a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HookPlan {
    pub(crate) site: Site,
    pub(crate) role: Role,
    pub(crate) source: KeySource,
    /// The word of the context that `source` is made of.
    pub(crate) key_word: u32,
    /// The word of the context that is a `struct sk_buff *`.
    pub(crate) skb_word: Option<u32>,
    /// The flow is seen from the other side here.
    pub(crate) reversed: bool,
    /// The packet may be gone by then, so nothing is read from it.
    pub(crate) late: bool,
    /// Of a start.
    pub(crate) subject: SubjectPlan,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Site {
    Entry(Function),
    Exit(Function),
    Tracepoint(Tracepoint),
}

/// What a hook does to the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Start,
    End,
    Abandon {
        /// One of `wire::outcome`.
        outcome: u32,
        /// The word of the context that is the kernel's reason.
        reason_word: Option<u32>,
        /// The word of the context that is an address in the function that did it.
        location_word: Option<u32>,
    },
}

/// What a key is made of: `enum key_source` in `hook.bpf.c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum KeySource {
    Address,
    SkbHead,
    SkbSock,
    SocketSock,
    FlowSkb,
    FlowSock,
    FlowSocket,
    Thread,
}

impl HookPlan {
    /// The word of the context that a record has in the place of a return value: that, or an address in the function that
    /// dropped the packet.
    pub(crate) fn return_word(&self) -> Option<u32> {
        match (&self.site, self.role) {
            (_, Role::Abandon { location_word, .. }) => location_word,
            (Site::Exit(function), _) if self.site.ret() != Return::Void => Some(function.signature.words()),
            _ => None,
        }
    }

    pub(crate) fn is_tracepoint(&self) -> bool {
        matches!(self.site, Site::Tracepoint(_))
    }
}

impl KeySource {
    /// Whether it is read from a packet.
    pub(crate) fn reads_packet(self) -> bool {
        matches!(self, Self::SkbHead | Self::SkbSock | Self::FlowSkb)
    }

    /// Whether a pointer has to be followed.
    pub(crate) fn needs_types(self) -> bool {
        !matches!(self, Self::Address | Self::Thread)
    }
}

impl Site {
    /// `None`: a tracepoint.
    pub(crate) fn function(&self) -> Option<&Function> {
        match self {
            Self::Entry(function) | Self::Exit(function) => Some(function),
            Self::Tracepoint(_) => None,
        }
    }

    /// `None`: it is in the kernel itself.
    pub(crate) fn module(&self) -> Option<&str> {
        match self {
            Self::Entry(function) | Self::Exit(function) => function.module.as_deref(),
            Self::Tracepoint(tracepoint) => tracepoint.module.as_deref(),
        }
    }

    /// What its function returns, where it can be seen.
    pub(crate) fn ret(&self) -> Return {
        match self {
            Self::Exit(function) => function.signature.ret,
            Self::Entry(_) | Self::Tracepoint(_) => Return::Void,
        }
    }
}

/// As [`Hook`](crate::Hook) is written.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(function) => function.fmt(f),
            Self::Exit(function) => write!(f, "{function}:exit"),
            Self::Tracepoint(tracepoint) => write!(f, "tp:{}", tracepoint.name),
        }
    }
}
