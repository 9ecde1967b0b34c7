/* The latch of mailbox/loadbox.h under sudden death: publish, kill at any step, repair by the next writer, read.
 *
 * Memory is sequentially consistent here; what weaker memory may reorder is the business of order.pml and litmus/.  A record is
 * two words instead of six: tearing needs no more.  Every life of a writer repairs, then publishes twice.  It may be killed
 * before any of its steps, the steps of the repair among them, and the next life begins at once.
 *
 * Readers claim, of every record that they accept, that it is whole and that it is the one that was current when they looked.
 * The ghost `current` says which that is: it changes together with the store that sends readers to the new copy.
 * After each death one claim more: the copy that the sequence points at is whole and current, so a reader needs no second try.
 *
 * Variants that must fail: NO_REPAIR, REPAIR_BACKWARDS, SEQ_RESTARTS, WRONG_COPY, ONE_COPY, NO_RECHECK. */

#define LIVES 3

byte seq, a[2], b[2];
byte current;
byte killed; /* lives 1..killed are over */
bool readable = true;

#ifdef WRONG_COPY
#define READ_B(s) ((s) % 2 == 0)
#else
#define READ_B(s) ((s) % 2 == 1)
#endif

inline publish(v)
{
    q = seq;
    seq = q + 1;
    a[0] = v;
    a[1] = v;
    atomic { seq = q + 2; current = v };
#ifndef ONE_COPY
    b[0] = v;
    b[1] = v
#endif
}

inline repair()
{
    q = seq;
    if
#ifdef NO_REPAIR
    :: true -> skip
#else
    :: q % 2 == 1 ->
#ifdef REPAIR_BACKWARDS
       b[0] = a[0];
       b[1] = a[1];
#else
       a[0] = b[0];
       a[1] = b[1];
#endif
       seq = q + 1
    :: else ->
       b[0] = a[0];
       b[1] = a[1]
#endif
    fi;
#ifdef SEQ_RESTARTS
    seq = 0
#endif
}

proctype writer(byte life)
{
    byte q;

    {
        repair();
        publish(2 * life - 1);
        publish(2 * life)
    } unless { killed >= life }
}

/* Between a death and the next life's first step nobody writes. */
inline look_at_remains()
{
#ifdef ONE_COPY
    readable = seq % 2 == 0;
#else
    if
    :: READ_B(seq) -> readable = b[0] == current && b[1] == current
    :: else -> readable = a[0] == current && a[1] == current
    fi;
#endif
    assert(readable)
}

proctype reader()
{
    byte s, x, y, wanted;
    bool whole;

end:
    do
    :: atomic { s = seq; wanted = current };
       if
#ifdef ONE_COPY
       :: s % 2 == 1 -> goto end
#else
       :: READ_B(s) -> x = b[0]; y = b[1]
#endif
       :: else -> x = a[0]; y = a[1]
       fi;
       d_step {
           whole = x == wanted && y == wanted;
#ifndef NO_RECHECK
           whole = whole || seq != s; /* else not accepted */
#endif
           assert(whole);
           whole = false; s = 0; x = 0; y = 0; wanted = 0
       }
    od
}

init
{
    byte life = 1;

    atomic { run reader(); run writer(1) };
    do
    :: life < LIVES ->
       atomic { killed = life; look_at_remains(); life++; run writer(life) }
    :: break
    od
}
