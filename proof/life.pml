/* Whose segment is it?  Two starters, a closer and a cleaner race for one name; the protocol of mailbox/_segment.py.
 *
 * The kernel's part: a name leads to an inode or to nothing; opening gives a descriptor that keeps its inode, unlinked or not; an
 * inode without name and without descriptors is free and its number is given out again; an open-file-description lock on byte 0 of
 * an inode has one holder and falls when the holder closes its descriptor or, some time after its death, when the kernel does.
 * Every system call is one step; between any two steps anybody else may run.
 *
 * closer   owns the segment at first; says "closed", compares its inode with the name, unlinks the name, lets go.
 * starter  creates, or opens what is there; locks; compares its inode with the name, else starts over; replaces a segment of
 *          another ABI; then owns it.  Refused only if a living owner stays: start_wait outlasts closers, cleaners and the dying.
 * cleaner  opens, locks, compares, unlinks, lets go; over and over.
 * The closer and one starter may be killed before any of their steps.  That starter may also find /dev/shm full after its lock.
 *
 * Claims, at every moment: whoever serves, serves the inode that the name leads to (so no two serve at once); nobody unlinks an
 * inode that another one serves.  In the end: exactly one serves, or, if the one that served was killed after the other had been
 * refused, none.
 *
 * Variants that must fail: NO_COMPARE, COMPARE_EARLY, NO_WAIT (the starter), CLOSER_UNLOCKED, CLEANER_UNLOCKED, CLEANER_NO_COMPARE.
 *
 * STRANGER adds somebody who keeps no rules and removes the name with rm, though not in the instant between another's comparison
 * and its unlink, which nothing can defend.  Then an orphaned owner may go on serving an inode without a name, which no reader
 * looks at; the claim that remains is that nobody, and above all no orphan, unlinks what another one serves.  (Nobody is killed then.)
 * STRANGER with CLOSER_NO_COMPARE must fail. */

#define NOTHING 255
#define INODES 5
#define CLOSER 0
#define FIRST 1
#define SECOND 2
#define CLEANER 3
#define PROCESSES 4
#define NOBODY 255

byte name;                  /* the inode that it leads to */
byte holder[INODES];        /* of the lock */
byte descriptors[INODES];
bool other_abi[INODES];
byte serves[PROCESSES];
bool killed[PROCESSES];
bool deciding[PROCESSES];   /* between its comparison and its unlink */
bool refused, settled[PROCESSES];
bool removes_live, serves_nameless, one_in_the_end; /* what the claims are about */

#define SERVED_BY_OTHER(i) ((me != CLOSER && serves[CLOSER] == (i)) || (me != FIRST && serves[FIRST] == (i)) \
                            || (me != SECOND && serves[SECOND] == (i)))
#define TRUE_OWNER(p) (serves[p] == NOTHING || serves[p] == name)

inline let_go()
{
    d_step {
        if
        :: mine != NOTHING ->
           descriptors[mine]--;
           if
           :: holder[mine] == me -> holder[mine] = NOBODY
           :: else -> skip
           fi;
           mine = NOTHING
        :: else -> skip
        fi;
        deciding[me] = false
    }
}

inline unlink_name()
{
    atomic {
        removes_live = name != NOTHING && SERVED_BY_OTHER(name);
        assert(!removes_live);
        name = NOTHING;
        deciding[me] = false
    }
}

/* Does the name lead to our inode?  (`mine` is the inode that a process has open.) */
#define IS_OURS (name == mine)

/* Both leave `mine` at NOTHING if the name has gone, or come, meanwhile. */
inline open_existing()
{
    if
    :: d_step { name != NOTHING -> mine = name; descriptors[name]++ }
    :: name == NOTHING -> skip
    fi
}

inline create_or_open()
{
    if
    :: d_step {
           name == NOTHING ->
           do
           :: descriptors[i] > 0 -> i++
           :: else -> break
           od;
           name = i; mine = i; descriptors[i] = 1; other_abi[i] = false; holder[i] = NOBODY; i = 0
       }
    :: name != NOTHING -> open_existing()
    fi
}

inline lock()
{
    d_step {
        if
        :: holder[mine] == NOBODY -> holder[mine] = me
        :: else -> skip
        fi
    }
}

/* The other starter serves, and nothing but a kill will end that. */
#define OTHER_STAYS (holder[mine] == FIRST + SECOND - me && serves[FIRST + SECOND - me] == mine)

proctype starter(byte me)
{
    byte i, mine = NOTHING;

    {
        skip;
over:   create_or_open();
        if
        :: mine == NOTHING -> goto over
        :: else -> skip
        fi;
#ifdef COMPARE_EARLY
        if
        :: IS_OURS -> skip
        :: else -> let_go(); goto over
        fi;
#endif
        lock();
        if
        :: holder[mine] == me -> skip
#ifdef NO_WAIT
        :: d_step { holder[mine] != me -> refused = true }; let_go(); goto settle
#else
        :: d_step { OTHER_STAYS -> refused = true }; let_go(); goto settle
#endif
        :: holder[mine] != me -> let_go(); goto over
        fi;
#if !defined(NO_COMPARE) && !defined(COMPARE_EARLY)
        if
        :: d_step { IS_OURS -> deciding[me] = true }
        :: !IS_OURS -> let_go(); goto over
        fi;
#endif
        if
        :: other_abi[mine] -> unlink_name(); let_go(); goto over
        :: me == FIRST -> unlink_name(); let_go() /* no room: what we made is taken away, under the lock */
        :: d_step { !other_abi[mine] -> serves[me] = mine; deciding[me] = false }
        fi;
settle:
        settled[me] = true;
end:    false
    } unless { killed[me] -> let_go(); settled[me] = true }
}

proctype closer(byte me)
{
    byte mine = 0;

    {
        serves[me] = NOTHING;
#ifdef CLOSER_UNLOCKED
        holder[mine] = NOBODY;
#endif
#ifdef CLOSER_NO_COMPARE
        unlink_name();
#else
        if
        :: d_step { IS_OURS -> deciding[me] = true }; unlink_name()
        :: !IS_OURS -> skip
        fi;
#endif
        let_go()
    } unless { killed[me] -> let_go() };
    settled[me] = true
}

proctype cleaner(byte me)
{
    byte mine = NOTHING;

end:
again:
    open_existing();
    if
    :: mine == NOTHING -> goto again
    :: else -> skip
    fi;
#ifdef CLEANER_UNLOCKED
    if
    :: holder[mine] != NOBODY -> let_go(); goto again
    :: else -> skip
    fi;
#else
    lock();
    if
    :: holder[mine] != me -> let_go(); goto again
    :: else -> skip
    fi;
#endif
#ifndef CLEANER_NO_COMPARE
    if
    :: d_step { IS_OURS -> deciding[me] = true }
    :: !IS_OURS -> let_go(); goto again
    fi;
#endif
    unlink_name();
    let_go();
    goto again
}

#ifndef STRANGER
/* Kill a process at any moment, or not at all.  What it served, it serves no longer; its lock falls later. */
proctype killer(byte who)
{
    if
    :: d_step { !settled[who] || serves[who] != NOTHING -> killed[who] = true; serves[who] = NOTHING }
    :: true -> skip
    fi
}
#endif

#ifdef STRANGER
proctype stranger()
{
    d_step {
        name != NOTHING && !deciding[CLOSER] && !deciding[FIRST] && !deciding[SECOND] && !deciding[CLEANER] -> name = NOTHING
    }
}
#else
proctype monitor()
{
end:
    do
    :: d_step {
           !(TRUE_OWNER(CLOSER) && TRUE_OWNER(FIRST) && TRUE_OWNER(SECOND)) -> serves_nameless = true; assert(!serves_nameless)
       }
    od
}
#endif

init
{
    atomic {
        byte n;
        for (n : 0 .. INODES - 1) { holder[n] = NOBODY }
        for (n : 0 .. PROCESSES - 1) { serves[n] = NOTHING }
        name = 0; descriptors[0] = 1; holder[0] = CLOSER; serves[CLOSER] = 0;
        if
        :: other_abi[0] = true
        :: skip
        fi;
        run closer(CLOSER);
        run starter(FIRST);
        run starter(SECOND);
        run cleaner(CLEANER);
#ifdef STRANGER
        run stranger()
#else
        run killer(CLOSER);
        run killer(FIRST);
        run monitor()
#endif
    }
#ifndef STRANGER
    d_step {
        settled[CLOSER] && settled[FIRST] && settled[SECOND] ->
        one_in_the_end = ((serves[FIRST] == NOTHING) != (serves[SECOND] == NOTHING)
                          || (killed[FIRST] && refused && serves[FIRST] == NOTHING && serves[SECOND] == NOTHING));
        assert(one_in_the_end)
    }
#endif
}
