//! Names that many events share.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// A name that many events share: of a span, of the hook where it ended, of a drop's reason.
///
/// As small as a pointer, and free to copy and to compare: each distinct name is stored once for the whole process, and
/// stays until it ends. There are few of these. Don't make names of what comes without end, such as packets' addresses.
///
/// It reads like a `&str`, and is ordered as one:
///
/// ```
/// use dwell::Name;
///
/// let span = Name::from("ip_rcv");
/// assert!(span == "ip_rcv");
/// assert_eq!(span.len(), 6);
/// assert!(span < Name::from("udp_rcv"));
/// ```
#[derive(Clone, Copy)]
pub struct Name(&'static &'static str);

/// All names that there are.
static NAMES: Mutex<BTreeMap<&'static str, Name>> = Mutex::new(BTreeMap::new());

impl Name {
    /// The name.
    pub fn as_str(&self) -> &'static str {
        self.0
    }
}

/// Takes a lock and, the first time for each name, memory.
impl From<&str> for Name {
    fn from(name: &str) -> Self {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(name) {
            return *known;
        }
        let stored: &'static str = Box::leak(name.into());
        let new = Self(Box::leak(Box::new(stored)));
        names.insert(new.as_str(), new);
        new
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Name {}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        self.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names compare by what they say, wherever they were made.
    #[test]
    fn compare() {
        let a = Name::from("ip_rcv");
        assert_eq!(a, std::thread::spawn(|| Name::from(&*String::from("ip_rcv"))).join().unwrap());
        assert_ne!(a, Name::from("ip_output"));
        assert!(a == "ip_rcv" && a == *"ip_rcv" && a > Name::from("ip_output"));
        assert_eq!((format!("{a:>8}"), format!("{a:?}")), ("  ip_rcv".to_owned(), "\"ip_rcv\"".to_owned()));
    }

    /// One pointer, so that events stay small.
    #[test]
    fn size() {
        assert_eq!(size_of::<Option<Name>>(), size_of::<usize>());
    }
}
