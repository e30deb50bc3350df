//! Points in the kernel: [`Hook`].

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// A point in the kernel: the entry or the exit of a function, or a raw tracepoint.
///
/// ```
/// use dwell::Hook;
///
/// let queued = Hook::tracepoint("net_dev_queue");
/// let received = Hook::entry("ip_rcv_core");
/// assert_eq!(queued.to_string(), "tp:net_dev_queue");
/// assert_eq!("udp_sendmsg:exit".parse::<Hook>()?, Hook::exit("udp_sendmsg"));
/// # Ok::<(), dwell::Error>(())
/// ```
///
/// # Kernel and privileges
///
/// Entries and exits (fentry, fexit) need what functions need, see [`LatencyProbe`](crate::LatencyProbe). Tracepoints
/// also work where the kernel refuses those. Where it refuses typed tracepoints as well, plain ones are used, which know
/// the addresses of arguments and nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Hook {
    pub(crate) place: Place,
    /// A function as `FUNCTION` or `MODULE:FUNCTION`, or a tracepoint.
    pub(crate) name: String,
    pub(crate) pick: Pick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    Entry,
    Exit,
    Tracepoint,
}

/// Which value carries the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pick {
    /// The first argument that can.
    Found,
    Argument(usize),
    Returned,
}

impl Hook {
    /// The entry of a function: `FUNCTION`, or `MODULE:FUNCTION` to say which module it is in.
    pub fn entry(function: impl Into<String>) -> Self {
        Self { place: Place::Entry, name: function.into(), pick: Pick::Found }
    }

    /// The exit of a function: when it returns.
    ///
    /// By then it may have freed its packet, and the address may be another packet's. So a key is taken from the packet
    /// that the function returns, if it does, or from a socket; a packet among its arguments is only taken if
    /// [`argument`](Self::argument) names it, and never read.
    pub fn exit(function: impl Into<String>) -> Self {
        Self { place: Place::Exit, name: function.into(), pick: Pick::Found }
    }

    /// A raw tracepoint, such as `net_dev_queue`: the names below `/sys/kernel/tracing/events/*/`, without the group.
    pub fn tracepoint(name: impl Into<String>) -> Self {
        Self { place: Place::Tracepoint, name: name.into(), pick: Pick::Found }
    }

    /// Takes the key from this argument, counted from 0, where several could carry it. By default the first one does.
    ///
    /// At the exit of a function, and at the tracepoint `net_dev_xmit`, it also says that a packet is sure to be still
    /// there: if it isn't, and its address has become another packet's, the latency is that of neither.
    ///
    /// ```
    /// use dwell::Hook;
    ///
    /// // struct sock *inet_csk_reqsk_queue_add(struct sock *sk, struct request_sock *req, struct sock *child)
    /// let established = Hook::entry("inet_csk_reqsk_queue_add").argument(2);
    /// # drop(established);
    /// ```
    pub fn argument(mut self, index: usize) -> Self {
        self.pick = Pick::Argument(index);
        self
    }

    /// Takes the key from the value that the function returns. Only at an [`exit`](Self::exit).
    ///
    /// ```
    /// use dwell::Hook;
    ///
    /// let accepted = Hook::exit("inet_csk_accept").returned();
    /// # drop(accepted);
    /// ```
    pub fn returned(mut self) -> Self {
        self.pick = Pick::Returned;
        self
    }

    /// What is wrong with it, as far as can be said without a kernel.
    pub(crate) fn complaint(&self) -> Option<String> {
        if self.place == Place::Tracepoint && self.name.contains(':') {
            let name = self.name.rsplit(':').next().unwrap_or_default();
            return Some(format!("`{}`: a raw tracepoint's name has no group: `{name}`?", self.name));
        }
        if !is_name(&self.name) {
            return Some(match self.place {
                Place::Tracepoint => format!("{:?} is not a tracepoint's name", self.name),
                _ => format!("{:?} is not a function's name: FUNCTION or MODULE:FUNCTION is", self.name),
            });
        }
        if self.pick == Pick::Returned && self.place != Place::Exit {
            return Some(format!("`{self}` returns nothing: only `Hook::exit` does"));
        }
        None
    }
}

/// The longest symbol that any kernel has (`KSYM_NAME_LEN`), twice, for `MODULE:FUNCTION`.
const LONGEST_NAME: usize = 1024;

pub(crate) fn is_name(name: &str) -> bool {
    let symbol = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$-".contains(&byte))
    };
    let (module, function) = name.split_once(':').unwrap_or(("vmlinux", name));
    name.len() <= LONGEST_NAME && symbol(module) && symbol(function)
}

/// As [`FromStr`] reads it: `NAME`, `NAME:exit`, `tp:NAME`. Which argument was chosen isn't shown.
impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Entry => f.pad(&self.name),
            Place::Exit => f.pad(&format!("{}:exit", self.name)),
            Place::Tracepoint => f.pad(&format!("tp:{}", self.name)),
        }
    }
}

/// `NAME` is a function's entry, `NAME:exit` its exit, `tp:NAME` a raw tracepoint. A function's name may have its module
/// in front: `MODULE:NAME`, `MODULE:NAME:exit`.
impl FromStr for Hook {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let hook = if let Some(name) = text.strip_prefix("tp:") {
            Self::tracepoint(name)
        } else if let Some(function) = text.strip_suffix(":exit") {
            Self::exit(function)
        } else {
            Self::entry(text)
        };
        match hook.complaint() {
            Some(complaint) => Err(Error::config("hook", complaint)),
            None => Ok(hook),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written is read again, with or without a module.
    #[test]
    fn reads_what_it_writes() {
        let hooks = [
            (Hook::entry("ip_rcv"), "ip_rcv"),
            (Hook::entry("nf_nat:nf_nat_ipv4_fn"), "nf_nat:nf_nat_ipv4_fn"),
            (Hook::exit("ip_rcv"), "ip_rcv:exit"),
            (Hook::exit("nf_nat:nf_nat_ipv4_fn"), "nf_nat:nf_nat_ipv4_fn:exit"),
            (Hook::tracepoint("net_dev_queue"), "tp:net_dev_queue"),
        ];
        for (hook, text) in hooks {
            assert_eq!(hook.to_string(), text);
            assert_eq!(text.parse::<Hook>().unwrap(), hook);
        }
    }

    /// What can't be a name is refused as such.
    #[test]
    fn names() {
        let long = "x".repeat(LONGEST_NAME + 1);
        for name in
            ["", " ", "ip rcv", "ip_rcv\0", "ip_rcv\n", "a:", ":a", "a:b:c", "*", "ïp_rcv", ":exit", "tp:", &long]
        {
            assert!(name.parse::<Hook>().is_err(), "{name:?}");
        }
        for name in ["ip_rcv", "___pskb_trim", "nf_nat:nf_nat_ipv4_fn", "ip_rcv_finish.isra.0", "tcp-bbr:f"] {
            assert!(name.parse::<Hook>().is_ok(), "{name}");
        }
        let error = "tp:net:net_dev_queue".parse::<Hook>().unwrap_err();
        assert_eq!(error.to_string(), "`net:net_dev_queue`: a raw tracepoint's name has no group: `net_dev_queue`?");
        let complaint = Hook::entry("ip_rcv").returned().complaint();
        assert_eq!(complaint.unwrap(), "`ip_rcv` returns nothing: only `Hook::exit` does");
    }
}
